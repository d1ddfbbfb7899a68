"""Who has which slot, and what each slot still holds: bookkeeping, without a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Slots", "Taken"]

WORTHWHILE = 4
"""Common beginnings of fewer tokens are computed again: copying or evicting for them does not pay."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A slot for a request. Its first ``reused`` tokens are there already, or are to be copied from ``source``."""

    slot: int
    reused: int = 0
    source: int | None = None


class Slots:
    """Slots of one model, by number. A slot that is given back keeps its tokens until it is needed.

    ``kept``: with so many slots or more, one that is idle is used again before another is made; with 0, what
    an idle slot holds is forgotten. The least recently used goes first. ``limit``: how many slots there is memory
    for; no more than these are kept.
    """

    def __init__(self, kept: int) -> None:
        self.count = 0
        self.limit: int | None = None
        self._kept = kept
        self._busy: dict[int, list[int]] = {}
        # In order of use, the oldest first.
        self._idle: dict[int, list[int]] = {}

    @property
    def busy(self) -> int:
        """Slots that requests have now."""
        return len(self._busy)

    def take(self, ids: Sequence[int], held: list[int]) -> Taken:
        """A slot for a prompt. ``held`` is the list in which its owner will keep what the slot holds.

        The longest beginning that some slot shares with the prompt is reused: in place where the slot is idle
        and holds little else, by a copy otherwise. The last token is always left to compute, for its logits.
        """
        ids = list(ids)
        best, common = None, 0
        for slot, tokens in (*self._idle.items(), *self._busy.items()):
            if (shared := _common(tokens, ids)) > common:
                best, common = slot, shared
        common = min(common, len(ids) - 1)
        if best is None or common < WORTHWHILE:
            return self._claim(self._next(), held)
        if best in self._idle:
            others = self._may_add or len(self._idle) > 1
            if 2 * common >= len(self._idle[best]) or not others:
                return self._claim(best, held, common)
        # What else the slot holds may be wanted again or is being written: it stays, and is copied from.
        return self._claim(self._next(best), held, common, best)

    def give(self, slot: int) -> None:
        """Take a slot back; what its owner's list says stays known."""
        tokens = self._busy.pop(slot)
        self._idle[slot] = list(tokens) if self._kept else []

    def trim(self, slots: int, length: int) -> list[tuple[int, int]]:
        """Keep the first ``slots`` slots alone, and of what idle ones hold the first ``length`` tokens.

        Returns the moves (from, to) of busy slots that this needs; of those there are no more than ``slots``.
        """
        self._idle = {slot: tokens[:length] for slot, tokens in self._idle.items() if slot < slots}
        free = (slot for slot in range(slots) if slot not in self._busy)
        moves = [(slot, next(free)) for slot in sorted(self._busy) if slot >= slots]
        for slot, target in moves:
            self._busy[target] = self._busy.pop(slot)
            self._idle.pop(target, None)
        self.count = min(self.count, slots)
        return moves

    def drop(self, slots: int) -> None:
        """Forget the last slots while they are idle and there are more than ``slots``."""
        while self.count > slots and self._idle.pop(self.count - 1, None) is not None:
            self.count -= 1

    @property
    def _may_add(self) -> bool:
        """Whether to make a new slot rather than lose what an idle one holds."""
        return self.count < (self._kept if self.limit is None else min(self._kept, self.limit))

    def _next(self, but: int | None = None) -> int | None:
        """The idle slot to use next, other than ``but``; None where a new one is to be made."""
        idle = [slot for slot in self._idle if slot != but]
        empty = [slot for slot in idle if not self._idle[slot]]
        if empty or not idle or self._may_add:
            return empty[0] if empty else None
        return idle[0]

    def _claim(self, slot: int | None, held: list[int], reused: int = 0, source: int | None = None) -> Taken:
        if slot is None:
            slot = self.count
            self.count += 1
        self._idle.pop(slot, None)
        self._busy[slot] = held
        return Taken(slot, reused, source)


def _common(one: list[int], two: list[int]) -> int:
    """Length of the common beginning, by bisection over slices, which compare fast."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
