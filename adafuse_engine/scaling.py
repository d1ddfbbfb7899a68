"""How an uncertain member widens its candidates: a distribution -> the first tokens of its branches.

``top_k``
    The most probable tokens.
``temperature``
    The most probable token, then draws without replacement from the distribution at ``scaling_temperature``.
``nucleus``
    The same from the nucleus alone: the fewest tokens whose mass reaches ``top_p`` (Holtzman et al. 2020).
``entropy_nucleus``
    The same, and no more branches than the distribution has choices: its perplexity exp(H), rounded up.

All of them put the most probable token first, and count the member's end tokens as one choice. Sampling
sees the first `SAMPLED_FROM` tokens; what lies beyond them is too improbable to matter.
"""

from __future__ import annotations

import math
from collections.abc import Set
from random import Random

from adafuse_engine.confidence import Distribution
from adafuse_engine.config import DecodingConfig

__all__ = ["SAMPLED_FROM", "first_tokens", "tokens_needed"]

SAMPLED_FROM = 128


def tokens_needed(settings: DecodingConfig, end_tokens: int) -> int:
    """How many of the most probable tokens `first_tokens` wants to see."""
    if settings.scaling == "top_k":
        return max(2, settings.branches + max(0, end_tokens - 1))
    return SAMPLED_FROM


def first_tokens(distribution: Distribution, ends: Set[int], settings: DecodingConfig, random: Random) -> list[int]:
    """First tokens of the branches, at most ``settings.branches``, the most probable first.

    ``random`` is drawn from by the sampling strategies alone.
    """
    choices = _choices(distribution, ends)
    limit = settings.branches
    if settings.scaling == "top_k":
        return [token for token, _ in choices[:limit]]
    if settings.scaling != "temperature":
        choices = _nucleus(choices, settings.top_p)
    if settings.scaling == "entropy_nucleus":
        limit = min(limit, math.ceil(_perplexity(choices)))
    greedy, *rest = choices
    # Gumbel noise on the log-probabilities and then the largest: draws without replacement (Kool et al. 2019).
    noisy = [(lp / settings.scaling_temperature + _gumbel(random), token) for token, lp in rest]
    noisy.sort(reverse=True)
    return [greedy[0], *(token for _, token in noisy[: limit - 1])]


def _choices(distribution: Distribution, ends: Set[int]) -> list[tuple[int, float]]:
    """The listed tokens with their log-probabilities, all end tokens as the best of them."""
    choices: list[tuple[int, float]] = []
    ended = False
    for token, logprob in zip(distribution.top_ids, distribution.top_logprobs, strict=True):
        if logprob == -math.inf:
            break
        if token not in ends:
            choices.append((token, logprob))
        elif not ended:
            ended = True
            choices.append((token, distribution.end_logprob))
    return choices


def _nucleus(choices: list[tuple[int, float]], top_p: float) -> list[tuple[int, float]]:
    mass = 0.0
    for count, (_, logprob) in enumerate(choices, start=1):
        mass += math.exp(logprob)
        if mass >= top_p:
            return choices[:count]
    return choices


def _perplexity(choices: list[tuple[int, float]]) -> float:
    """Of the choices taken as the whole distribution: how many equally likely ones they amount to."""
    total = math.fsum(math.exp(lp) for _, lp in choices)
    entropy = -math.fsum(math.exp(lp) / total * (lp - math.log(total)) for _, lp in choices)
    return math.exp(entropy)


def _gumbel(random: Random) -> float:
    return -math.log(-math.log(random.random() or 1e-300))
