"""Who may come in: with a cap on a model's keys and values, requests wait in order of arrival until theirs fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from adafuse_engine.config import DecodingConfig
from adafuse_engine.members.local.kv_cache import GRAIN
from adafuse_engine.members.local.runner import Runner, Tree

__all__ = ["Admission", "spare_columns"]


def spare_columns(settings: DecodingConfig) -> int:
    """Columns for a round's tokens behind the prefix: its own spans and another member's, at their longest."""
    return 2 * (settings.branches + settings.max_words) * (settings.max_word_tokens + 3) + 2


@dataclass(frozen=True, slots=True)
class _Waiting:
    tree: Tree
    ids: Sequence[int]
    columns: int
    entered: Future[None]


class Admission:
    """The door to a runner's slots. All of it runs on the device's worker thread, `most_columns` aside.

    All slots are as long as the longest: so many requests fit as their number times the longest one's columns may
    be. The first that waits is the first to come in, and nobody passes it. Members ask in the order in which
    their engine starts requests, so that two requests never wait for each other at two members.
    """

    def __init__(self, runner: Runner, most_bytes: int | None) -> None:
        self._runner = runner
        self._waiting: deque[_Waiting] = deque()
        self._inside: list[tuple[Tree, int]] = []
        self._most: int | None = None
        cache = runner.cache
        # The check at load has filled the cache; a runner that keeps nothing has none to limit.
        if most_bytes is not None and cache.bytes:
            self._most = most_bytes * cache.slots * cache.length // cache.bytes
            cache.most = self._most

    def most_columns(self, members: int) -> int | None:
        """Columns that one request of ``members`` members on this model may have in each; None for no limit."""
        return None if self._most is None else self._most // members

    def enter(self, tree: Tree, ids: Sequence[int], columns: int, entered: Future[None]) -> None:
        """Open the tree for a prompt as soon as so many columns fit; then ``entered`` is done."""
        self._waiting.append(_Waiting(tree, ids, columns, entered))
        self._advance()

    def leave(self, tree: Tree) -> None:
        """Close the tree and let in who fits now. May be called again, and by one that still waits."""
        self._waiting = deque(w for w in self._waiting if w.tree is not tree)
        self._inside = [(t, columns) for t, columns in self._inside if t is not tree]
        self._runner.close(tree)
        self._advance()

    def _advance(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            longest = max([first.columns, *(columns for _, columns in self._inside)])
            if self._most is not None and (len(self._inside) + 1) * longest > self._most:
                return
            self._waiting.popleft()
            if not first.entered.set_running_or_notify_cancel():
                continue
            try:
                self._make_room(longest)
                self._runner.open(first.tree, first.ids)
            except BaseException as error:
                first.entered.set_exception(error)
            else:
                self._inside.append((first.tree, first.columns))
                first.entered.set_result(None)

    def _make_room(self, longest: int) -> None:
        """Shape the pool so that one more slot of that length is within the cap, at the cost of idle ones."""
        if self._most is None:
            return
        cache, slots = self._runner.cache, self._runner.slots
        rounded = -(-longest // GRAIN) * GRAIN
        length = max(rounded, cache.length)
        if self._most // length <= len(self._inside):
            length = longest
        slots.limit = self._most // length
        if length != cache.length or slots.count > slots.limit:
            self._runner.fit(slots.limit, length)
