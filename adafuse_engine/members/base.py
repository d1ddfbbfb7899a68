"""What the decoding loop asks of a member. Members speak bytes and scores; token ids stay inside."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random
from typing import Protocol, runtime_checkable

from adafuse_engine.config import ConfidenceKind, DecodingConfig
from adafuse_engine.types import Branch, Candidate, MemberUsage, Prompt, Score

__all__ = ["Connected", "Member", "OutOfRoom", "Session"]


class OutOfRoom(Exception):
    """A member's context window is full: the text ends here, by length."""


class Session(Protocol):
    """One member's side of one request: its prompt, its KV, its place in the ledger.

    Only one method runs at a time. After `close` nothing may be called. Methods that compute raise `OutOfRoom`
    where the context window is full.
    """

    @property
    def signature(self) -> Hashable:
        """Equal for two sessions that must behave the same: same weights, same prompt."""
        ...

    @property
    def group(self) -> Hashable:
        """Equal for sessions whose forwards are made together, as on the same weights."""
        ...

    @property
    def room(self) -> int:
        """Tokens that still fit the context window."""
        ...

    def confidence(self, kind: ConfidenceKind) -> float:
        """At the end of the ledger, in [0, 1]. Not to be asked while words are deferred."""
        ...

    def can_write(self, data: bytes) -> bool:
        """Whether this member has tokens for these bytes; a candidate that some member cannot follow is dropped."""
        ...

    async def outline(self, settings: DecodingConfig, random: Random) -> list[Candidate | Branch]:
        """Spans from the end of the ledger: certain words, then branches where certainty ends.

        Of the branches the most probable is complete, and any that needs nothing more; the others are begun.
        """
        ...

    async def complete(self, branches: Sequence[Branch], settings: DecodingConfig) -> list[Candidate]:
        """Write branches of the last outline to the end of their words."""
        ...

    async def consider(self, drafts: Sequence[Candidate]) -> None:
        """Look at other members' candidates before outlining, so that agreeing with them costs nothing."""
        ...

    def skip(self, branches: int) -> None:
        """Count branches of its outline that are left unwritten, for the usage."""
        ...

    @property
    def pace(self) -> float:
        """Seconds that a forward of a few tokens takes, by what was measured so far; 0 if nothing was."""
        ...

    async def lead(self, settings: DecodingConfig) -> Candidate:
        """The certain words alone; needs a confidence at or above the threshold."""
        ...

    async def score(self, candidates: Sequence[Candidate], settings: DecodingConfig) -> list[Score]:
        """What this member thinks of each candidate, in order."""
        ...

    async def commit(self, words: Sequence[bytes]) -> None:
        """Append words to the ledger: keep their KV rows, drop all others."""
        ...

    def defer(self, words: Sequence[bytes]) -> None:
        """Append words to the ledger without computing anything yet (`sync` will)."""
        ...

    async def sync(self) -> None:
        """Catch up with deferred words in one forward; nothing if there are none."""
        ...

    def pieces(self, words: Sequence[bytes]) -> list[bytes]:
        """The words as this member's tokens, each as bytes: what `commit` would append."""
        ...

    def usage(self) -> MemberUsage:
        """What the request cost so far."""
        ...

    async def close(self) -> None:
        """Free all the request holds. May be called more than once."""
        ...


@runtime_checkable
class Member(Protocol):
    """One language model of the ensemble."""

    @property
    def name(self) -> str:
        """How usage, traces and per-member prompts call it."""
        ...

    @property
    def context_window(self) -> int:
        """Most tokens of prompt and continuation together."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, no special tokens added. For counting; they mean nothing elsewhere."""
        ...

    async def open(self, prompt: Prompt, settings: DecodingConfig) -> Session:
        """Start a request: render the prompt, prefill it.

        Raises `EmptyPromptError`, `ContextWindowError`, `MemberError`.
        """
        ...

    def close(self) -> None:
        """Free the member's weights and threads. May be called more than once."""
        ...


@runtime_checkable
class Connected(Protocol):
    """A member that holds something open on the event loop of an engine that uses it."""

    async def disconnect(self) -> None:
        """Close what it holds on the running loop."""
        ...
