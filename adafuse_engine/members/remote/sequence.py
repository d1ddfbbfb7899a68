"""A token tree over a server's answers. Nothing is kept on the server but what its prefix cache happens to hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from time import perf_counter

import numpy as np

from adafuse_engine.confidence import Distribution
from adafuse_engine.members.guide import Guide
from adafuse_engine.members.local.tokens import Vocabulary
from adafuse_engine.members.remote.dialect import Dialect, Look, Sight
from adafuse_engine.members.session import Fed, survivors
from adafuse_engine.words import starts_with_space

__all__ = ["Pace", "RemoteSequence"]

Path = tuple[int, ...]

ALLOWED_ASKED = 32
"""Tokens of a grammar that are asked for where it allows none of the most probable ones."""


class Pace:
    """Seconds that a question takes, as a moving mean that all requests of a member share."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def note(self, seconds: float) -> None:
        """Take in one more."""
        self.seconds = seconds if not self.seconds else 0.8 * self.seconds + 0.2 * seconds


class RemoteSequence:
    """`TokenSequence` that asks a server. What its read-ahead told is kept until the ledger takes another way.

    Of a distribution it knows the ``top`` most probable tokens. The mass that starts a word is their share of it,
    the entropy takes the rest for spread out evenly, and an end that is not among them has at most the probability
    of the last of them, unless its dialect asks for it (`Dialect.asks_freely`).
    """

    def __init__(
        self, dialect: Dialect, vocabulary: Vocabulary, ids: Sequence[int], top: int, ahead: int, pace: Pace
    ) -> None:
        self._dialect = dialect
        self._vocabulary = vocabulary
        self._prefix = tuple(ids)
        self._top = top
        self._ahead = ahead
        self._pace = pace
        self._ends = tuple(sorted(vocabulary.ends)) if dialect.asks_freely else ()
        self._paths: list[Path] = [()]
        self._parents = [-1]
        self._guides: list[Guide | None] = [None]
        self._known: dict[Path, dict[int, float]] = {}
        self._asked: dict[Path, dict[int, float]] = {}
        self.forward_passes = 0
        self.tokens_processed = len(self._prefix)
        self.seconds = 0.0
        self.reused = 0

    @property
    def pace(self) -> float:
        """Seconds that a question takes."""
        return self._pace.seconds

    async def prefill(self, guide: Guide | None) -> Distribution:
        """What follows the prompt."""
        self._guides = [guide]
        await self._learn({(): set(self._ends)})
        await self._learn_allowed([0])
        return self._distribution(0)

    async def grow(
        self, parents: Sequence[int], tokens: Sequence[int], guides: Sequence[Guide | None] = ()
    ) -> list[Fed]:
        """What the server thinks of these tokens, and what follows each."""
        first = len(self._paths)
        wanted: dict[Path, set[int]] = {}
        for i, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            above = self._paths[parent]
            path = (*above, token)
            self._paths.append(path)
            self._parents.append(parent)
            self._guides.append(guides[i] if guides else None)
            if token not in self._known.get(above, {}) and token not in self._asked.get(above, {}):
                wanted.setdefault(above, set()).add(token)
            missing = {e for e in self._ends if e not in self._known.get(path, {})}
            if path not in self._known or missing - self._asked.get(path, {}).keys():
                wanted.setdefault(path, set()).update(missing)
        self.tokens_processed += len(tokens)
        await self._learn(wanted)
        new = range(first, len(self._paths))
        if guides:
            await self._learn_allowed(new)
        return [Fed(self._logprob(self._parents[n], self._paths[n][-1]), self._distribution(n)) for n in new]

    async def keep(self, path: Sequence[int]) -> None:
        """Make a path part of the prefix: the next question simply has more ids."""
        if not path:
            return
        root = path[-1]
        taken = self._paths[root]
        depth = len(taken)
        left = survivors(self._parents, root)
        kept = list(left)
        self._prefix += taken
        self._parents = [-1, *(left[self._parents[n]] for n in kept[1:])]
        self._guides = [self._guides[n] for n in kept]
        self._paths = [self._paths[n][depth:] for n in kept]
        self._known = {p[depth:]: row for p, row in self._known.items() if p[:depth] == taken}
        self._asked = {p[depth:]: row for p, row in self._asked.items() if p[:depth] == taken}

    async def release(self) -> None:
        """Nothing is held there."""

    # ---- asking

    async def _learn(self, wanted: dict[Path, set[int]]) -> None:
        if not wanted:
            return
        looks = [
            Look(self._prefix + path, tuple(sorted(ask)), 0 if path in self._known else self._ahead)
            for path, ask in wanted.items()
        ]
        start = perf_counter()
        sights = await self._dialect.look(looks, self._top)
        spent = perf_counter() - start
        self.forward_passes += 1
        self.seconds += spent
        self._pace.note(spent)
        for path, sight in zip(wanted, sights, strict=True):
            self._take(path, sight)

    def _take(self, path: Path, sight: Sight) -> None:
        if sight.asked:
            self._asked.setdefault(path, {}).update(sight.asked)
        for i, top in enumerate(sight.tops):
            self._known.setdefault((*path, *sight.tokens[:i]), top)

    async def _learn_allowed(self, nodes: Sequence[int]) -> None:
        """Where the grammar allows none of the most probable tokens, ask for some that it allows."""
        wanted: dict[Path, set[int]] = {}
        for n in nodes:
            guide, path = self._guides[n], self._paths[n]
            if guide is None:
                continue
            allowed = _allowed(guide, self._vocabulary.size)
            if not any(allowed[t] for t in self._row(path)):
                few = np.flatnonzero(allowed)[: ALLOWED_ASKED if self._dialect.asks_freely else 4]
                wanted[path] = {int(t) for t in few}
        await self._learn({path: ask for path, ask in wanted.items() if ask})

    # ---- telling

    def _row(self, path: Path) -> dict[int, float]:
        """All that is known after a path, as if tokens that are never written had no mass."""
        told = {**self._asked.get(path, {}), **self._known.get(path, {})}
        banned, size = self._vocabulary.banned, self._vocabulary.size
        row = {t: lp for t, lp in told.items() if t < size and t not in banned}
        if len(row) == len(told):
            return row
        mass = math.fsum(math.exp(lp) for lp in row.values())
        never = math.fsum(math.exp(lp) for t, lp in told.items() if t not in row)
        left = max(mass, 1.0 - never)
        return {t: lp - math.log(left) for t, lp in row.items()} if left > 0 else row

    def _within(self, n: int) -> tuple[dict[int, float], float]:
        """The row of a node as its grammar allows it, and the log mass that it is to be divided by."""
        row, guide = self._row(self._paths[n]), self._guides[n]
        if guide is None:
            return row, 0.0
        allowed = _allowed(guide, self._vocabulary.size)
        row = {t: lp for t, lp in row.items() if allowed[t]}
        return row, _logsum(row.values())

    def _logprob(self, parent: int, token: int) -> float:
        row, norm = self._within(parent)
        value = row.get(token, -math.inf)
        if value == -math.inf:
            value = self._row(self._paths[parent]).get(token, -math.inf)
        return min(0.0, value - norm)

    def _distribution(self, n: int) -> Distribution:
        row, norm = self._within(n)
        ends, size = self._vocabulary.ends, self._vocabulary.size
        if not row:
            return Distribution((0,), (-math.inf,), -math.inf, -math.inf, math.nan, size)
        ranked = sorted(((lp - norm, t) for t, lp in row.items()), key=lambda pair: (-pair[0], pair[1]))
        values = [lp for lp, _ in ranked]
        mass = math.fsum(map(math.exp, values))
        rest = max(0.0, 1.0 - mass)
        end = _logsum([lp for lp, t in ranked if t in ends])
        if end == -math.inf and self._guides[n] is None:
            end = min(values[-1], math.log(rest) if rest > 0 else values[-1])
        bytes_of = self._vocabulary.bytes_of
        start = _logsum([lp for lp, t in ranked if t in ends or starts_with_space(bytes_of(t))])
        spread = -math.fsum(math.exp(lp) * lp for lp in values)
        if rest > 1e-9 and size > len(values):
            spread -= rest * math.log(rest / (size - len(values)))
        shown = ranked[: max(self._top, 2)]
        return Distribution(
            tuple(t for _, t in shown),
            tuple(lp for lp, _ in shown),
            end,
            start - math.log(mass) if start > -math.inf else end,
            spread,
            size,
        )


def _allowed(guide: Guide, size: int) -> np.ndarray:
    bits = np.frombuffer(guide.mask(), dtype=np.uint8)
    return np.unpackbits(bits, count=size, bitorder="little").astype(bool)


def _logsum(values: Iterable[float]) -> float:
    found = list(values)
    if not found:
        return -math.inf
    top = max(found)
    return float(top + math.log(math.fsum(math.exp(v - top) for v in found)))
