"""Weights that move, during a request, with how much each member agreed with what was committed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adafuse_engine.fusion import log_softmax
from adafuse_engine.types import Score

__all__ = ["MOST", "AdaptiveWeights"]

KEPT = 0.8
"""Of the agreement so far, what a round leaves; the rest is the round's own."""

MOST = 4.0
"""The ratio of two members' weights moves by no more than this factor."""


class AdaptiveWeights:
    """The members' weights, times a power of their recent agreement relative to the mean.

    A member's agreement with a round is the share that it gives the committed candidate among all candidates. With
    ``strength`` 0 weights stay as they were given. Members without a weight get none.
    """

    def __init__(self, weights: Sequence[float], strength: float) -> None:
        self.now = list(weights)
        self._given = list(weights)
        self._strength = strength
        self._agreement = [1.0] * len(self._given)

    def note(self, scores: Sequence[Sequence[Score]], winner: int) -> None:
        """Take in a round's scores, ``scores[k][c]``, and the candidate that won."""
        if not self._strength:
            return
        for k, row in enumerate(scores):
            totals = [score.total for score in row]
            if all(map(math.isfinite, totals)):
                share = math.exp(log_softmax(totals)[winner])
                self._agreement[k] = KEPT * self._agreement[k] + (1 - KEPT) * share
        mean = math.fsum(self._agreement) / len(self._agreement)
        moved = [w * self._factor(a / mean) for w, a in zip(self._given, self._agreement, strict=True)]
        self.now = [w / math.fsum(moved) for w in moved]

    def _factor(self, relative: float) -> float:
        half = math.sqrt(MOST)
        return float(min(half, max(1 / half, relative**self._strength)))
