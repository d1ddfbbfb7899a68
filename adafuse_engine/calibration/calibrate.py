"""Which threshold, which weights, and whether an ensemble at all."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from adafuse_engine.calibration.trials import Lab, Trial
from adafuse_engine.calibration.weights import bits_per_byte, learn_weights
from adafuse_engine.errors import InvalidArgumentError

__all__ = ["THRESHOLDS", "Calibration", "calibrate", "chance_above"]

THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was tried and what was chosen.

    Parameters
    ----------
    alone
        Each member by itself.
    rules
        Always fused, by weights and mix.
    curve
        The best of those under a gate, by threshold.
    chosen
        What the configuration will say. One member alone if that is better (``harmless``).
    bits_per_byte
        Of the right answers, per member and for the mixture with the learned weights; empty without answers.
    learned
        Weights, by member, that make the right answers most probable; empty without answers.
    """

    alone: tuple[Trial, ...]
    rules: tuple[Trial, ...]
    curve: tuple[Trial, ...]
    chosen: Trial
    verdict: str
    bits_per_byte: dict[str, float] = field(default_factory=dict)
    learned: dict[str, float] = field(default_factory=dict)

    @property
    def best_alone(self) -> Trial | None:
        """The best single member, where it is known which answers are right."""
        return max(self.alone, key=lambda t: t.quality) if self.alone else None

    @property
    def harmless(self) -> bool:
        """Whether the choice fell on a single member, because no ensemble was better."""
        return len(self.chosen.members) == 1


def calibrate(
    lab: Lab,
    weights: Sequence[float],
    *,
    most_fused: float | None = None,
    most_cost: float | None = None,
    keep_ensemble: bool = False,
    told: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Try settings on the lab's rows and choose.

    Parameters
    ----------
    weights
        The members' weights so far.
    most_fused, most_cost
        At most this share of words decided by scores; at most this share of the forwards of always fusing. Of
        what is allowed the best is chosen; among equals the cheapest.
    keep_ensemble
        Choose an ensemble even where the best member alone is better.
    told
        Called with a line after each trial.

    Without known answers nothing can be said about quality: then a limit must be given, and the threshold that
    comes nearest to always fusing within it is chosen.
    """
    if lab.labelled:
        return _labelled(lab, weights, most_fused, most_cost, keep_ensemble, told)
    if most_fused is None and most_cost is None:
        raise InvalidArgumentError(
            "without answers there is no quality to find a threshold for; give the most words to fuse, or the cost"
        )
    always = _told(lab.run("always fused", weights, gate="never"), told)
    curve = _curve(lab, weights, {}, always, told)
    allowed = [t for t in [*curve, always] if _within(t, always, most_fused, most_cost)]
    chosen = max(allowed or curve[:1], key=lambda t: (t.fused_share, -t.forward_passes))
    return Calibration((), (always,), tuple(curve), chosen, _unlabelled(chosen, always, bool(allowed)))


def _labelled(
    lab: Lab,
    weights: Sequence[float],
    most_fused: float | None,
    most_cost: float | None,
    keep_ensemble: bool,
    told: Callable[[str], None],
) -> Calibration:
    told(f"{len(lab.rows)} rows; learning weights from the right answers ...")
    scores = lab.score()
    learned = learn_weights(scores)
    bits = {name: bits_per_byte(scores, [float(name == other) for other in lab.names]) for name in lab.names} | {
        "mixture": bits_per_byte(scores, list(learned.values()))
    }
    alone = [_told(lab.run(f"{n} alone", weights, only=[n], gate="never"), told) for n in lab.names]
    rules = []
    for label, shares in (("given weights", list(weights)), ("learned weights", list(learned.values()))):
        if len(lab.names) > 1:
            for mix in ("geometric", "arithmetic"):
                rules.append(_told(lab.run(f"{label}, {mix}", shares, gate="never", mix=mix), told))
    best_alone = max(alone, key=lambda t: t.quality)
    if not rules:
        return Calibration(tuple(alone), (), (), best_alone, "There is one member only.", bits, learned)
    best = max(rules, key=lambda t: (t.quality, -t.forward_passes))
    shares = list(best.weights)
    curve = _curve(lab, shares, {"mix": best.settings["mix"]}, best, told)
    allowed = [t for t in [*curve, best] if _within(t, best, most_fused, most_cost)]
    chosen = max(allowed or curve[:1], key=lambda t: (t.quality, -t.forward_passes))
    if chosen.quality > best_alone.quality or keep_ensemble:
        return Calibration(
            tuple(alone), tuple(rules), tuple(curve), chosen, _verdict(chosen, best_alone), bits, learned
        )
    better = "The best member alone is better" if best_alone.quality > chosen.quality else "No ensemble is better"
    verdict = (
        f"{better}: {best_alone.members[0]} alone has {100 * best_alone.quality:.1f}, the best ensemble "
        f"{100 * chosen.quality:.1f}. The configuration names that member alone."
    )
    return Calibration(tuple(alone), tuple(rules), tuple(curve), best_alone, verdict, bits, learned)


def _curve(
    lab: Lab, weights: Sequence[float], settings: dict[str, Any], always: Trial, told: Callable[[str], None]
) -> list[Trial]:
    return [
        _told(
            lab.run(
                f"{always.name}, gated at {threshold}", weights, gate="any_certain", threshold=threshold, **settings
            ),
            told,
        )
        for threshold in THRESHOLDS
    ]


def _told(trial: Trial, told: Callable[[str], None]) -> Trial:
    mark = f"{100 * trial.quality:5.1f}  " if trial.marks else ""
    told(f"{mark}{trial.forward_passes:6d} forwards, {100 * trial.fused_share:3.0f} % fused  {trial.name}")
    return trial


def _within(trial: Trial, always: Trial, most_fused: float | None, most_cost: float | None) -> bool:
    return (most_fused is None or trial.fused_share <= most_fused) and (
        most_cost is None or trial.forward_passes <= most_cost * always.forward_passes
    )


def _verdict(chosen: Trial, best_alone: Trial) -> str:
    above = chance_above(chosen.marks, best_alone.marks)
    sign = "better" if chosen.quality > best_alone.quality else "no better"
    return (
        f"The ensemble is {sign} than its best member: {100 * chosen.quality:.1f} against "
        f"{100 * best_alone.quality:.1f} ({best_alone.members[0]}); above it in {100 * above:.0f} % of resampled "
        f"rows, at {chosen.forward_passes / max(1, best_alone.forward_passes):.1f} times its forwards."
    )


def _unlabelled(chosen: Trial, always: Trial, allowed: bool) -> str:
    same = statistics.fmean(a == b for a, b in zip(chosen.texts, always.texts, strict=True))
    start = "" if allowed else "Nothing that was tried stays within the limit; this comes nearest. "
    return (
        f"{start}{100 * chosen.fused_share:.0f} % of the words are fused, with "
        f"{chosen.forward_passes / max(1, always.forward_passes):.2f} of the forwards of always fusing; "
        f"{100 * same:.0f} % of the answers are those of always fusing. Nothing is known of quality."
    )


def chance_above(mine: Sequence[float], others: Sequence[float], times: int = 1000, seed: int = 0) -> float:
    """How often the mean of ``mine`` is above that of ``others`` on resampled rows, the same for both."""
    draw = random.Random(seed)
    differences = [a - b for a, b in zip(mine, others, strict=True)]
    size = len(differences)
    return statistics.fmean(sum(draw.choices(differences, k=size)) > 0 for _ in range(times))
