"""A session whose failures are noted rather than raised, so that the other members can go on without it."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Hashable, Sequence
from random import Random
from typing import Any, TypeVar

from adafuse_engine.config import ConfidenceKind, DecodingConfig
from adafuse_engine.errors import MemberError
from adafuse_engine.members.base import Session
from adafuse_engine.types import Branch, Candidate, MemberUsage, Score

__all__ = ["GuardedSession"]

T = TypeVar("T")


class GuardedSession:
    """A session in which a `MemberError` ends the member's part: it proposes nothing more and abstains.

    ``failure``: that error. Whoever asks afterwards gets answers that change nothing, until the member is dropped.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.failure: MemberError | None = None

    @property
    def signature(self) -> Hashable:
        """As it is."""
        return self._session.signature

    @property
    def group(self) -> Hashable:
        """As it is."""
        return self._session.group

    @property
    def room(self) -> int:
        """As it is."""
        return self._session.room

    @property
    def pace(self) -> float:
        """As it is; slower than all others once it failed."""
        return math.inf if self.failure else self._session.pace

    def confidence(self, kind: ConfidenceKind) -> float:
        """As it is; none once it failed."""
        if self.failure is None:
            try:
                return self._session.confidence(kind)
            except MemberError as error:
                self.failure = error
        return 0.0

    def can_write(self, data: bytes) -> bool:
        """As it is; it need not once it failed."""
        return self.failure is not None or self._session.can_write(data)

    async def outline(self, settings: DecodingConfig, random: Random) -> list[Candidate | Branch]:
        """As it is; no proposals once it failed."""
        return await self._tried(self._session.outline(settings, random), [])

    async def complete(self, branches: Sequence[Branch], settings: DecodingConfig) -> list[Candidate]:
        """As it is; None for every branch once it failed."""
        nothing: list[Any] = [None] * len(branches)
        return await self._tried(self._session.complete(branches, settings), nothing)

    async def consider(self, drafts: Sequence[Candidate]) -> None:
        """As it is."""
        await self._tried(self._session.consider(drafts), None)

    def skip(self, branches: int) -> None:
        """As it is."""
        self._session.skip(branches)

    async def lead(self, settings: DecodingConfig) -> Candidate:
        """As it is; an empty candidate, which no round can commit, once it failed."""
        return await self._tried(self._session.lead(settings), Candidate(()))

    async def score(self, candidates: Sequence[Candidate], settings: DecodingConfig) -> list[Score]:
        """As it is; it abstains once it failed."""
        return await self._tried(
            self._session.score(candidates, settings), [Score.abstention(c) for c in candidates]
        )

    async def commit(self, words: Sequence[bytes]) -> None:
        """As it is."""
        await self._tried(self._session.commit(words), None)

    def defer(self, words: Sequence[bytes]) -> None:
        """As it is."""
        self._session.defer(words)

    async def sync(self) -> None:
        """As it is."""
        await self._tried(self._session.sync(), None)

    def pieces(self, words: Sequence[bytes]) -> list[bytes]:
        """As it is."""
        return self._session.pieces(words)

    def usage(self) -> MemberUsage:
        """As it is."""
        return self._session.usage()

    async def close(self) -> None:
        """As it is."""
        await self._session.close()

    async def _tried(self, call: Coroutine[Any, Any, T], otherwise: T) -> T:
        if self.failure is not None:
            call.close()
            return otherwise
        try:
            return await call
        except MemberError as error:
            self.failure = error
            return otherwise
