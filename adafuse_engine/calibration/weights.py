"""Members' weights from texts that should have been written, without decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.scoring import TextScore

__all__ = ["bits_per_byte", "learn_weights"]


def learn_weights(
    scores: Sequence[TextScore], *, prior: float = 1.0, steps: int = 500, tolerance: float = 1e-7
) -> dict[str, float]:
    """Weights, by member, under which the mixture of the members finds the texts most probable.

    By expectation maximisation over words: each is shared out among the members by how likely each made it, and the
    weights are the shares. The log-likelihood of a mixture is concave in its weights: this finds its maximum.

    Parameters
    ----------
    scores
        What the members said of each text, of at least one word in all (`Engine.score_batch`).
    prior
        Words' worth of equal weights to begin with, so that few texts do not silence a member.
    """
    names = tuple(scores[0].members) if scores else ()
    words = [step for score in scores for step in zip(*(score.members[name] for name in names), strict=True)]
    if not words:
        raise InvalidArgumentError("there is no word to learn weights from")
    weights = [1 / len(names)] * len(names)
    for _ in range(steps):
        counts = [prior / len(names)] * len(names)
        for said in words:
            top = max(said)
            shares = [w * math.exp(v - top) for w, v in zip(weights, said, strict=True)] if top > -math.inf else []
            if total := sum(shares):
                counts = [c + s / total for c, s in zip(counts, shares, strict=True)]
        before, weights = weights, [c / sum(counts) for c in counts]
        if max(abs(a - b) for a, b in zip(before, weights, strict=True)) < tolerance:
            break
    return dict(zip(names, weights, strict=True))


def bits_per_byte(scores: Sequence[TextScore], weights: Sequence[float]) -> float:
    """Bits per byte of all the texts together, by the mixture with these weights: lower is better."""
    length = sum(score.bytes for score in scores)
    return sum(score.bits_per_byte(weights=weights) * score.bytes for score in scores) / max(1, length)
