"""Members' scores -> the winner (DESIGN section 4).

==================  ==============================================================================
``mean_nll``        -sum_k w_k * mean over tokens of NLL_k: the paper's rule
``bits_per_byte``   -sum_k w_k * NLL_k / (bytes * ln 2): comparable across tokenizers; the end is a byte
``word_posterior``  log of the ensemble's probability of the next word, compared at equal length
``vote``            sum_k w_k * confidence_k * softmax over the candidates of member k's log-probabilities
==================  ==============================================================================

``mix="geometric"`` averages the logarithms of what the members say, ``"arithmetic"`` the values themselves;
``"auto"`` is arithmetic for ``vote`` and geometric for the others, as the table has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from adafuse_engine.config import FusionRule
from adafuse_engine.errors import NoScoreError
from adafuse_engine.types import Branch, Candidate, Score

__all__ = ["Decision", "Rules", "can_win", "fuse", "is_worth_scoring", "log_softmax"]

MORE_LIKELY_THAN_NOT = math.log(0.5)
# Rounding may order two sums of the same numbers either way; bounds allow for that.
SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Rules:
    """How to fuse: the rule, arithmetic or geometric, and the temperature of the draw (0: the best)."""

    rule: FusionRule
    arithmetic: bool = False
    temperature: float = 0.0

    @property
    def bounds_branches(self) -> bool:
        """Whether `can_win` can rule out a branch; a draw gives every candidate its chance."""
        return self.rule == "word_posterior" and self.temperature == 0

    @property
    def bounds_candidates(self) -> bool:
        """Whether `is_worth_scoring` can rule out a candidate."""
        return self.rule in _PER_LENGTH and self.temperature == 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The winner: candidate ``index``, of which the first ``words`` and perhaps the ``end`` are committed.

    ``scores``: the fused score of each candidate, higher is better; for ``word_posterior`` that of its first
    word. ``abstained``: indices of the members whose scores were not finite and had no say.
    """

    index: int
    words: int
    end: bool
    scores: tuple[float, ...]
    abstained: tuple[int, ...] = ()


def fuse(
    candidates: Sequence[Candidate],
    scores: Sequence[Sequence[Score]],
    weights: Sequence[float],
    confidences: Sequence[float],
    rules: Rules,
    random: Random,
) -> Decision:
    """Choose among ``candidates``.

    ``scores[k][c]`` is member k's score of candidate c, ``weights[k]`` its weight, ``confidences[k]`` its
    confidence at the ledger. Ties go to the earlier candidate. A member with a score that is not finite
    abstains from the whole choice, so that all candidates are compared by the same members; if all with a
    weight abstain, `NoScoreError`.
    """
    abstained = tuple(k for k, row in enumerate(scores) if not all(_finite(s) for s in row))
    voting = [k for k in range(len(scores)) if k not in abstained and weights[k] > 0]
    if not voting:
        raise NoScoreError(
            "every member gave NaN or -inf to some candidate, so nothing can be chosen; "
            "load the members with dtype='float32', or leave the failing one out"
        )
    panel = _panel([scores[k] for k in voting], [weights[k] for k in voting], rules)
    if rules.rule == "word_posterior":
        return _descend(candidates, panel, rules, random, abstained)
    by_length = rules.rule in _PER_LENGTH
    say = [confidences[k] for k in voting]
    fused = _by_length(rules.rule, candidates, panel) if by_length else _vote(candidates, panel, say)
    index = _pick(fused, rules.temperature, random)
    winner = candidates[index]
    return Decision(index, len(winner.words), winner.end, tuple(fused), abstained)


def can_win(
    branch: Branch,
    proposer: int,
    candidates: Sequence[Candidate],
    scores: Sequence[Sequence[Score]],
    weights: Sequence[float],
    rules: Rules,
) -> bool:
    """Whether some completion of ``branch`` could still change what is committed, given these scores.

    For `word_posterior` without a draw. No completion is more probable than what it begins with: under its
    proposer that is ``branch.logprob``, under the others the words it shares with a scored candidate. At the
    first word it must reach the best first word's probability, further on one half. True where no bound is
    known: for the rules that divide by a length, and when a draw gives every candidate its chance.
    """
    if not rules.bounds_branches or not all(_finite(s) for row in scores for s in row):
        return True
    depth = len(branch.words)
    same = next((c for c, x in enumerate(candidates) if depth and x.words[:depth] == branch.words), None)
    bounds = [0.0 if same is None else row[same].logprobs[depth - 1] for row in scores]
    bounds[proposer] = branch.logprob
    panel = _panel(scores, weights, rules)
    reach = panel.mix(bounds)
    if depth:
        return reach + SLACK > MORE_LIKELY_THAN_NOT
    groups = _children(candidates, range(len(candidates)), 0)
    return reach + SLACK >= max(_logprob(candidates[g[0]], g[0], 0, panel) for g in groups)


def is_worth_scoring(
    candidate: Candidate,
    proposer: int,
    own: Score,
    candidates: Sequence[Candidate],
    scores: Sequence[Sequence[Score]],
    weights: Sequence[float],
    rules: Rules,
) -> bool:
    """Whether a candidate that its proposer alone has scored could still beat the best of ``candidates``.

    For `mean_nll` and `bits_per_byte` without a draw: the others can at best be certain of it. True for the
    other rules: `word_posterior` compares word by word, and every share of a `vote` depends on all candidates.
    """
    if not rules.bounds_candidates or not all(_finite(s) for row in (*scores, [own]) for s in row):
        return True
    value = _PER_LENGTH[rules.rule]
    panel = _panel(scores, weights, rules)
    best = max(_by_length(rules.rule, candidates, panel))
    reach = panel.mix([value(candidate, own) if k == proposer else 0.0 for k in range(len(scores))])
    return reach + SLACK >= best


@dataclass(frozen=True, slots=True)
class _Panel:
    """The members that have a say, with weights that sum to 1."""

    scores: Sequence[Sequence[Score]]
    weights: list[float]
    arithmetic: bool

    def mix(self, values: Sequence[float], weights: Sequence[float] | None = None) -> float:
        """The members' log-values averaged, as logarithms or as values."""
        weights = weights or self.weights
        if not self.arithmetic:
            return math.fsum(w * v for w, v in zip(weights, values, strict=True))
        top = max(values)
        mass = math.fsum(w * math.exp(v - top) for w, v in zip(weights, values, strict=True))
        return top + math.log(mass) if mass > 0 else -math.inf


def _panel(scores: Sequence[Sequence[Score]], weights: Sequence[float], rules: Rules) -> _Panel:
    total = math.fsum(weights)
    return _Panel(scores, [w / total for w in weights], rules.arithmetic)


def _finite(score: Score) -> bool:
    return all(map(math.isfinite, (*score.logprobs, *score.boundary, score.end_logprob or 0.0)))


def _per_token(candidate: Candidate, score: Score) -> float:
    return score.total / max(1, score.tokens)


def _per_byte(candidate: Candidate, score: Score) -> float:
    return score.total / (max(1, len(candidate.data) + candidate.end) * math.log(2))


_PER_LENGTH: dict[FusionRule, Callable[[Candidate, Score], float]] = {
    "mean_nll": _per_token,
    "bits_per_byte": _per_byte,
}


def _by_length(rule: FusionRule, candidates: Sequence[Candidate], panel: _Panel) -> list[float]:
    value = _PER_LENGTH[rule]
    return [panel.mix([value(x, row[c]) for row in panel.scores]) for c, x in enumerate(candidates)]


def _vote(candidates: Sequence[Candidate], panel: _Panel, confidences: Sequence[float]) -> list[float]:
    """In logarithms, so that it mixes as the other rules do; the order is that of the sum of votes."""
    say = [w * c for w, c in zip(panel.weights, confidences, strict=True)]
    if not any(say):
        say = panel.weights
    shares = [log_softmax([s.total for s in row]) for row in panel.scores]
    return [panel.mix([share[c] for share in shares], say) for c in range(len(candidates))]


def _descend(
    candidates: Sequence[Candidate], panel: _Panel, rules: Rules, random: Random, abstained: tuple[int, ...]
) -> Decision:
    """Down the trie of candidate words: the best first word, then deeper while it is more likely than not."""
    first = _children(candidates, range(len(candidates)), 0)
    level = [_logprob(candidates[group[0]], group[0], 0, panel) for group in first]
    chosen = first[_pick(level, rules.temperature, random)]
    scores = [0.0] * len(candidates)
    for group, value in zip(first, level, strict=True):
        for c in group:
            scores[c] = value
    words, end = _step(candidates[chosen[0]], 0)
    while not end:
        deeper = _children(candidates, chosen, words)
        values = [_logprob(candidates[group[0]], group[0], words, panel) for group in deeper]
        if not values or max(values) <= MORE_LIKELY_THAN_NOT:
            break
        chosen = deeper[values.index(max(values))]
        words, end = _step(candidates[chosen[0]], words)
    return Decision(chosen[0], words, end, tuple(scores), abstained)


def _children(candidates: Sequence[Candidate], among: Sequence[int], depth: int) -> list[list[int]]:
    """Candidates that go on after ``depth`` words, grouped by how: by their next word, or by the end."""
    groups: dict[bytes | None, list[int]] = {}
    for c in among:
        candidate = candidates[c]
        if depth < len(candidate.words):
            groups.setdefault(candidate.words[depth], []).append(c)
        elif candidate.end:
            groups.setdefault(None, []).append(c)
    return list(groups.values())


def _step(candidate: Candidate, depth: int) -> tuple[int, bool]:
    """Words taken and whether the text has ended, one step below ``depth``."""
    return (depth + 1, False) if depth < len(candidate.words) else (depth, True)


def _logprob(candidate: Candidate, c: int, depth: int, panel: _Panel) -> float:
    """The ensemble's log-probability of the candidate up to one step below ``depth``."""
    if depth < len(candidate.words):
        return panel.mix([row[c].logprobs[depth] + row[c].boundary[depth] for row in panel.scores])
    return panel.mix([row[c].total for row in panel.scores])


def log_softmax(values: Sequence[float]) -> list[float]:
    """Logarithms of shares that sum to 1, from log-values."""
    top = max(values)
    norm = top + math.log(math.fsum(math.exp(v - top) for v in values))
    return [v - norm for v in values]


def _pick(scores: Sequence[float], temperature: float, random: Random) -> int:
    """The index of the best score, or a draw from softmax(score / temperature)."""
    if temperature <= 0 or len(scores) == 1:
        return scores.index(max(scores))
    shares = [math.exp(v) for v in log_softmax([s / temperature for s in scores])]
    return random.choices(range(len(scores)), shares)[0]
