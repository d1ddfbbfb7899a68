"""An answer held to a grammar: what may and what must come next, and how to end in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adafuse_engine.config import DecodingConfig
from adafuse_engine.members.guide import END_OF_TEXT, Guide
from adafuse_engine.types import Candidate
from adafuse_engine.words import first_word_end

__all__ = ["Held"]

NEAR = 64
"""Tokens before the last from which on it is watched whether what is open can be ended."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """A short way to end what is open at a place, and the tokens that it takes."""

    words: tuple[bytes, ...]
    tokens: int


class Held:
    """Where the answer stands in its grammar, by bytes.

    ``pieces``: words -> tokens, as the answer's tokens are counted. Ask `near_the_end` before a round and
    `can_end_after` once its words are known; then `commit` them, or take ``ending`` in their place.
    """

    def __init__(self, guide: Guide, pieces: Callable[[Sequence[bytes]], list[bytes]]) -> None:
        self._here: Guide | None = guide
        self.pieces = pieces
        self._ending: _Ending | None = None
        self._far: int | None = None
        # Of a round that was asked about and not committed yet.
        self._after: Guide | None = None
        self._next: _Ending | None = None

    @property
    def ending(self) -> Candidate | None:
        """The short way to end what is open; None if there is none, or the end is far off."""
        return Candidate(self._ending.words, True) if self._ending else None

    def allows(self, candidate: Candidate) -> bool:
        """Whether the grammar allows the candidate, and the end of the text if it has one."""
        data = [*candidate.data, *[END_OF_TEXT] * candidate.end]
        return self._here is not None and self._here.allows(data)

    def forced(self) -> Candidate | None:
        """The whole words that must come next; None if there are none."""
        if self._here is None:
            return None
        data = self._here.forced()
        after = self._here.after(list(data)) if data else self._here
        end = after is not None and after.finished
        words = _words(data)
        # The last one may go on, unless it is the end.
        candidate = Candidate(tuple(words if end else words[:-1]), end)
        return candidate if candidate.words or end else None

    def near_the_end(self, settings: DecodingConfig, left: int) -> DecodingConfig:
        """The settings, with short spans where long ones would leave no room to end what is open."""
        if self._ending is None and self._here is not None:
            self._ending = self._from(self._here, left)
        if self._ending is None:
            return settings
        spare = left - self._ending.tokens
        if spare >= settings.max_words * (settings.max_word_tokens + 3):
            return settings
        tokens = min(settings.max_word_tokens, max(1, spare))
        return settings.model_copy(update={"max_words": 1, "max_word_tokens": tokens})

    def can_end_after(self, words: Sequence[bytes], end: bool, left: int) -> bool:
        """Whether what is open after these words can be ended in ``left`` tokens, if it can be now."""
        if self._here is None or self._ending is None or self._ending.tokens > left:
            return True
        used = len(self.pieces(words))
        after = self._here.after(list(b"".join(words)))
        if end or after is None:
            return used <= left
        ending = self._from(after, left)
        if ending is not None and used + ending.tokens > left:
            return False
        self._after, self._next = after, ending
        return True

    def commit(self, words: Sequence[bytes]) -> None:
        """Go on behind these words."""
        if self._here is not None:
            self._here = self._after or self._here.after(list(b"".join(words)))
        self._ending, self._after, self._next = self._next, None, None

    def _from(self, guide: Guide, left: int) -> _Ending | None:
        if self._far is not None and left > self._far:
            return None
        rest = guide.way_out()
        if rest is None:
            return None
        words = tuple(_words(rest))
        tokens = len(self.pieces(words))
        if self._far is None:
            # A round opens no more, about, than the whole answer has open at its beginning.
            self._far = 2 * tokens + NEAR
        return _Ending(words, tokens)


def _words(data: bytes) -> list[bytes]:
    """Its words; the last one may be the beginning of one."""
    words = []
    while (size := first_word_end(data)) is not None:
        words.append(data[:size])
        data = data[size:]
    return [*words, data] if data else words
