"""Answers held to a grammar: what may come next, in a member's tokens or in bytes. The parsing is llguidance's."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from adafuse_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["END_OF_TEXT", "Guide", "Guides", "byte_guides"]

END_OF_TEXT = 256
"""Among the tokens of `byte_guides`."""

ANY_TOKENS = '%llguidance {"no_forcing": true}\n'
"""Where a text is forced, llguidance allows no tokens but those its tokenizer would write the whole of it with.
Words are tokenised one by one here, so every token that spells a part of it has to be allowed."""

REMEMBERED = 32
"""Grammars that are kept compiled per tokenizer."""


class Guide:
    """A place in a text that follows a grammar. It never changes: `after` gives the next place."""

    def __init__(self, matcher: LLMatcher, ends: Set[int]) -> None:
        self._matcher = matcher
        self._ends = ends

    def after(self, tokens: Sequence[int]) -> Guide | None:
        """The place after more tokens; None where the grammar does not allow them."""
        copy = self._matcher.deep_copy()
        return Guide(copy, self._ends) if copy.consume_tokens(list(tokens)) else None

    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens may come next, the last of them perhaps an end."""
        if tokens and tokens[-1] in self._ends:
            before = self.after(tokens[:-1])
            return before is not None and before._matcher.is_accepting()
        return self._matcher.validate_tokens(list(tokens)) == len(tokens)

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may come next."""
        return self._matcher.is_stopped()

    def way_out(self, most: int = 2000) -> bytes | None:
        """A short text that ends what is open, for a guide over bytes; None if none of ``most`` bytes was found.

        Of the bytes that may come next it takes one that closes something rather than one that goes on. For
        JSON that is about the shortest rest; other grammars may have shorter ones, or some that it misses.
        """
        data = bytearray()
        here: Guide | None = self
        while here is not None and len(data) <= most:
            if here.allows([END_OF_TEXT]):
                return bytes(data)
            step = here.forced() or bytes([here._closer()])
            data += step
            here = here.after(list(step))
        return None

    def _closer(self) -> int:
        """The byte to go on with in order to end soon."""
        mask = self.mask()
        allowed = {b for b in range(256) if mask[b // 8] >> (b % 8) & 1}
        # Where letters and brackets may both come, they are part of a string, and end nothing.
        order = b'"q' if allowed >= set(b"q}") else b'}]>),"0123456789'
        return next((b for b in order if b in allowed), min(allowed, default=END_OF_TEXT - 1))

    def mask(self) -> bytes:
        """One bit per token id, the lowest first: those that may come next, ends where the text may end."""
        return self._matcher.compute_bitmask()

    def forced(self) -> bytes:
        """What has to come next whatever the members think; empty where there is a choice."""
        return self._matcher.compute_ff_bytes()


class Guides:
    """Guides over one set of tokens: prepared with the model, or when the first grammar is asked for.

    ``tokens``: what each id writes, nothing for those that are never written. ``ends``: the ids that end a
    text. ``encode``: ids for a text's bytes.
    """

    def __init__(self, tokens: Sequence[bytes], ends: Set[int], encode: Callable[[bytes], list[int]]) -> None:
        self._source = _Tokens(tokens, ends, encode)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._known: dict[str, LLMatcher] = {}

    def prepare(self) -> LLTokenizer:
        """Make what all grammars need. For 262,144 tokens it took 1.7 s, and no Python thread runs meanwhile."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tokenizer is None:
                ends = sorted(self._source.ends)
                self._tokenizer = LLTokenizer(TokenizerWrapper(self._source), eos_token=ends)
            return self._tokenizer

    async def start(self, grammar: str) -> Guide:
        """The beginning of a text; compiled off the event loop.

        Raises `InvalidArgumentError` for a grammar that does not compile.
        """
        return await asyncio.to_thread(self.begin, grammar)

    def begin(self, grammar: str) -> Guide:
        """`start` for callers that may wait."""
        from llguidance import LLMatcher  # imported when it is needed

        tokenizer = self.prepare()
        with self._lock:
            matcher = self._known.pop(grammar, None)
            if matcher is None:
                matcher = LLMatcher(tokenizer, ANY_TOKENS + grammar, log_level=0)
                if matcher.is_error():
                    raise InvalidArgumentError(f"grammar: {matcher.get_error()}")
            self._known[grammar] = matcher
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
            return Guide(matcher.deep_copy(), self._source.ends)


class _Tokens:
    """A tokenizer as llguidance wants one."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], ends: Set[int], encode: Callable[[bytes], list[int]]) -> None:
        self.tokens = list(tokens)
        self.ends = ends
        self.eos_token_id = min(ends)
        self.special_token_ids: list[int] = []
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.encode() if isinstance(text, str) else text)


@functools.cache
def byte_guides() -> Guides:
    """Guides over bytes: the token of a byte is its value, and `END_OF_TEXT` ends the text."""
    return Guides([*(bytes([b]) for b in range(256)), b""], frozenset({END_OF_TEXT}), list)
