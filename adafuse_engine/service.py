"""Service levels: how much fusing a request can afford, round by round. Knows no sessions and reads one clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from time import monotonic
from typing import Any

from adafuse_engine.config import DecodingConfig

__all__ = ["Governor", "Plan", "Progress", "ladder"]

FLOOR = 0.3
"""The threshold is never lowered below this (short of single-member writing, which asks for none)."""

DROP = 0.2
"""How far one step lowers the threshold."""

EASE = 0.8
"""A costlier step is taken again only if it is expected to use no more than this part of what is left."""

FADE = 0.95
"""What is remembered of a costlier step's price shrinks by this with each round, so that it is tried again."""

RECENT = 0.5
"""The last round's part in the price of a step."""

HORIZON = 16
"""Words that ``words_per_second`` looks ahead."""

SMALL_FORWARDS = 6
"""Forwards of one member in a fused round beside those that write words: catching up, looking at others'
candidates, scoring what is known, its own, and the union, committing."""

CUT = 3
"""Tokens by which a word may pass its cap, to end the character it is in."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request has come to: tokens and words written, forwards made by all members (prefill included)."""

    tokens: int
    words: int
    forwards: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings for one round.

    ``single``: one member leads it, however confident it is. ``retry``: settings to fuse with if no words come
    of it that every member's tokenizer can write, for fewer branches are fewer to choose from; None where the
    budget has no forwards for that. ``report`` is for the trace: None where the settings are the request's own.
    """

    settings: DecodingConfig
    single: bool = False
    retry: DecodingConfig | None = None
    report: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Price:
    """What a step costs, by what was measured."""

    seconds_per_token: float
    seconds_per_word: float
    forwards_per_token: float

    def blended(self, old: _Price | None) -> _Price:
        if old is None:
            return self
        return _Price(
            RECENT * self.seconds_per_token + (1 - RECENT) * old.seconds_per_token,
            RECENT * self.seconds_per_word + (1 - RECENT) * old.seconds_per_word,
            RECENT * self.forwards_per_token + (1 - RECENT) * old.forwards_per_token,
        )

    def times(self, factor: float) -> _Price:
        return _Price(
            factor * self.seconds_per_token, factor * self.seconds_per_word, factor * self.forwards_per_token
        )


def ladder(settings: DecodingConfig) -> list[DecodingConfig]:
    """The steps from the request's own settings down to the cheapest.

    First the gate ``any_certain`` is on, the others following lazily; then the threshold goes down by `DROP`
    to `FLOOR`; then there is one branch; on the last step one member leads every round (any confidence
    counts as certain) and the others do nothing. What the settings have already is no step of its own, but
    the last step is always there, for on it the leader is chosen otherwise.
    """
    gated = settings.model_copy(update={"gate": "any_certain", "catch_up": "lazy"})
    steps = [settings, gated]
    while steps[-1].threshold > FLOOR:
        steps.append(gated.model_copy(update={"threshold": max(FLOOR, round(steps[-1].threshold - DROP, 2))}))
    steps.append(steps[-1].model_copy(update={"branches": 1}))
    alone = steps[-1].model_copy(update={"threshold": 0.0})
    return [steps[0], *(after for before, after in pairwise(steps) if after != before), alone]


class Governor:
    """Keeps a request within ``deadline_s``, ``words_per_second`` and ``max_forward_passes``.

    Make it when the request starts (the deadline counts from then), call `begin` when the prompt is read,
    then `plan` before each round.

    How it reckons. The settings are a `ladder` of steps, each cheaper than the one before. Each round's
    seconds and forwards per token and per word are put into a moving average of the step it was made on. For
    each limit the *load* is the expected cost of what is left over what may still be spent:

    - ``deadline_s``: seconds per token times the tokens left up to ``max_tokens`` (nobody knows how long the
      text will be, so this is its upper bound), over the seconds left;
    - ``words_per_second``: seconds that the next `HORIZON` words take, over the time until they are due when
      the words are counted from the end of the prefill;
    - ``max_forward_passes``: forwards per token times the tokens left, over the forwards left.

    The greatest load decides. Above 1 the next round is made one step down; with no time left at all, on the
    cheapest step, and it stays there to the end of the text, for being late is no error. A step up is made
    when the load expected on that step is at most `EASE`. It is expected to cost what it cost the last time,
    less `FADE` for each round since, and never less than the present step; a step not measured yet is
    expected to cost twice the present one.

    The budget is hard: no round is begun whose worst case (all words as long as ``max_word_tokens`` lets them
    be) is more than the forwards left. A round that does not fit is made with fewer words, then on a cheaper
    step, and on the cheapest with its word cut at the forwards left. Of the budget at most four forwards stay
    unused, since a character can take four and a member that is behind takes one to catch up. Then `plan`
    gives None, and the text ends.
    """

    def __init__(self, limits: DecodingConfig, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._deadline = inf if limits.deadline_s is None else clock() + limits.deadline_s
        self._pace = limits.words_per_second
        self._budget = limits.max_forward_passes
        self._because = ""

    @classmethod
    def of(cls, limits: DecodingConfig) -> Governor | None:
        """One for these limits, or None if there are none to keep."""
        given = (limits.deadline_s, limits.words_per_second, limits.max_forward_passes)
        return None if given == (None, None, None) else cls(limits)

    def begin(self, settings: DecodingConfig, members: int) -> None:
        """The prompt is read; rounds of ``members`` members follow, with these settings where nothing presses."""
        self._steps = ladder(settings)
        self._prices: list[_Price | None] = [None] * len(self._steps)
        self._retry = settings.model_copy(update={"max_words": 1})
        self._members = members
        self._level = 0
        self._begun = self._time = self._clock()
        self._seen: Progress | None = None

    def plan(self, now: Progress) -> Plan | None:
        """Settings of the next round; None if the budget has nothing left to write with."""
        self._measure(now)
        self._move(now)
        if self._budget is None:
            return self._made(self._steps[self._level])
        return self._fitted(self._budget - now.forwards)

    # ---- the level

    def _measure(self, now: Progress) -> None:
        """Put what the last round cost to the account of its step."""
        time = self._clock()
        if self._seen is not None:
            tokens, words = max(1, now.tokens - self._seen.tokens), max(1, now.words - self._seen.words)
            took = time - self._time
            price = _Price(took / tokens, took / words, (now.forwards - self._seen.forwards) / tokens)
            self._prices[self._level] = price.blended(self._prices[self._level])
            for above in range(self._level):
                if (old := self._prices[above]) is not None:
                    self._prices[above] = old.times(FADE)
        self._seen, self._time = now, time

    def _move(self, now: Progress) -> None:
        """One step down where the load is too great (all of them if it is endless), or one up if it is small."""
        because, load = self._load(now, self._prices[self._level])
        cheapest = len(self._steps) - 1
        if load > 1:
            self._level = cheapest if load == inf else min(cheapest, self._level + 1)
            self._because = because
        elif self._level and (here := self._prices[self._level]) is not None:
            above = self._prices[self._level - 1] or here.times(2)
            if max(load, self._load(now, above)[1]) <= EASE:
                self._level -= 1

    def _load(self, now: Progress, price: _Price | None) -> tuple[str, float]:
        """The limit that presses most at this price, and its load: 0 where the price is not known yet."""
        price = price or _Price(0.0, 0.0, 0.0)
        tokens = max(1, self._steps[0].max_tokens - now.tokens)
        loads = {"deadline_s": _over(price.seconds_per_token * tokens, self._deadline - self._time)}
        if self._pace is not None:
            due = self._begun + (now.words + HORIZON) / self._pace
            loads["words_per_second"] = _over(price.seconds_per_word * HORIZON, due - self._time)
        if self._budget is not None:
            loads["max_forward_passes"] = _over(price.forwards_per_token * tokens, self._budget - now.forwards)
        return max(loads.items(), key=lambda item: item[1])

    # ---- the budget

    def _fitted(self, left: int) -> Plan | None:
        """The plan with the most words, on this step or the next below, whose worst case is within ``left``."""
        cheapest = len(self._steps) - 1
        for level in range(self._level, cheapest):
            step = self._steps[level]
            words = min(
                step.max_words, (left - self._fused(step, 0)) // self._members // (step.max_word_tokens + CUT)
            )
            if words >= 1:
                self._fall(level)
                return self._made(step, words, left - self._fused(step, words))
        self._fall(cheapest)
        step = self._steps[cheapest]
        # One forward is for catching up.
        left -= 1
        if left <= CUT:
            return None
        tokens = min(step.max_word_tokens, left - CUT)
        words = max(1, min(step.max_words, left // (tokens + CUT)))
        short = step.model_copy(update={"max_word_tokens": tokens})
        return self._made(short, words, left - words * (tokens + CUT))

    def _fused(self, step: DecodingConfig, words: int) -> int:
        """Most forwards of a fused round, all members together; its branches are written after its words."""
        words += step.branches > 1
        return self._members * (SMALL_FORWARDS + words * (step.max_word_tokens + CUT))

    def _fall(self, level: int) -> None:
        if level != self._level:
            self._level, self._because = level, "max_forward_passes"

    def _made(self, step: DecodingConfig, words: int | None = None, spare: float = inf) -> Plan:
        """The plan for a step with at most so many words, after which ``spare`` forwards are left."""
        single = self._level == len(self._steps) - 1
        because = self._because
        if words is not None and words < step.max_words:
            step = step.model_copy(update={"max_words": words})
            because = because if self._level else "max_forward_passes"
        if step == self._steps[0] and not single:
            return Plan(step)
        report = {
            "mode": "single" if single else "fused" if step.gate == "never" else "gated",
            "threshold": step.threshold,
            "branches": step.branches,
            "max_words": step.max_words,
            "because": because,
        }
        retry = self._retry if spare >= self._fused(self._retry, 1) else None
        return Plan(step, single, retry, report)


def _over(cost: float, left: float) -> float:
    return cost / left if left > 0 else inf
