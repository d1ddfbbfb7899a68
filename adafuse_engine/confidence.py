"""A next-token distribution -> how sure its member is, in [0, 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adafuse_engine.config import ConfidenceKind

__all__ = ["Distribution", "confidence"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """A member's next-token distribution, summarised.

    Ids are the member's own and mean nothing outside it. ``top_ids``/``top_logprobs``: the most probable
    tokens, best first, in nats. ``end_logprob``: logsumexp over the member's end tokens.
    ``start_logmass``: log mass of the tokens that start with whitespace or end the text. ``entropy``: of
    the whole distribution in nats, NaN unless it was asked for. ``size``: entries that can occur.
    """

    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    end_logprob: float
    start_logmass: float
    entropy: float
    size: int

    @property
    def greedy(self) -> int:
        """The most probable token."""
        return self.top_ids[0]

    @property
    def finite(self) -> bool:
        """Whether this is a distribution at all: false if its logits held a NaN."""
        return math.isfinite(self.top_logprobs[0])


def confidence(distribution: Distribution, kind: ConfidenceKind) -> float:
    """How sure: ``margin`` p1 - p2 (the paper's, section 3), ``entropy`` 1 - H / log V, ``max_prob`` p1."""
    if kind == "entropy":
        if distribution.size < 2:
            return 1.0
        return min(1.0, max(0.0, 1.0 - distribution.entropy / math.log(distribution.size)))
    first = math.exp(distribution.top_logprobs[0])
    if kind == "max_prob":
        return min(1.0, first)
    second = math.exp(distribution.top_logprobs[1]) if len(distribution.top_logprobs) > 1 else 0.0
    return min(1.0, first - second)
