"""What a calibration found, as one page that needs nothing from outside, and as pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adafuse_engine.calibration.calibrate import Calibration
from adafuse_engine.calibration.trials import Trial
from adafuse_engine.errors import MissingExtraError

__all__ = ["curve_figure", "reliability", "reliability_figure", "write_report"]

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
tr.chosen td { font-weight: 700; }
.verdict { font-size: 1.15rem; border-left: .3rem solid #0072b2; padding-left: 1rem; }
figure { margin: 2rem 0; } img { max-width: 100%; background: #fff; }
"""


def write_report(path: str | Path, calibration: Calibration, title: str = "Calibration") -> None:
    """Write the page. Raises `MissingExtraError` without matplotlib."""
    trials = [*calibration.alone, *calibration.rules, *calibration.curve]
    rows = "".join(_row(t, chosen=t is calibration.chosen) for t in trials)
    figures = _img(curve_figure(calibration), "Quality and cost of every setting that was tried")
    if calibration.chosen.marks:
        figures += _img(
            reliability_figure(calibration.chosen), "How often answers are right, by how sure they were"
        )
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style>
<h1>{html.escape(title)}</h1>
<p class="verdict">{html.escape(calibration.verdict)}</p>
<p>{len(calibration.chosen.texts)} rows. Chosen: {html.escape(calibration.chosen.name)}.</p>
{figures}
<h2>What was tried</h2>
<table><tr><th>setting</th><th>quality</th><th>forwards</th><th>fused words</th></tr>{rows}</table>
{_bits(calibration)}
</html>
"""
    Path(path).expanduser().write_text(page, encoding="utf-8")


def _bits(calibration: Calibration) -> str:
    if not calibration.bits_per_byte:
        return ""
    told = calibration.bits_per_byte.items()
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{bits:.3f}</td></tr>" for name, bits in told)
    learned = ", ".join(f"{html.escape(n)} {w:.2f}" for n, w in calibration.learned.items())
    return f"<h2>Bits per byte of the right answers</h2><table>{rows}</table><p>Learned weights: {learned}.</p>"


def _row(trial: Trial, *, chosen: bool) -> str:
    quality = f"{100 * trial.quality:.1f}" if trial.marks else "-"
    return (
        f"<tr{' class=chosen' if chosen else ''}><td>{html.escape(trial.name)}</td><td>{quality}</td>"
        f"<td>{trial.forward_passes}</td><td>{100 * trial.fused_share:.0f} %</td></tr>"
    )


def _img(figure: Any, alt: str) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=144)
    source = base64.b64encode(data.getvalue()).decode()
    alt = html.escape(alt)
    return f'<figure><img alt="{alt}" src="data:image/png;base64,{source}"><figcaption>{alt}</figcaption></figure>'


def _axes(x: str, y: str) -> tuple[Any, Any]:
    try:
        # Not pyplot: it keeps figures, and may want a display.
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "calibrate") from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    return figure, axes


def curve_figure(calibration: Calibration) -> Any:
    """Quality (without answers, the share of fused words) against forwards; the best single member as a line."""
    labelled = bool(calibration.chosen.marks)
    figure, axes = _axes("forwards of all members", "right answers, %" if labelled else "fused words, %")

    def height(trial: Trial) -> float:
        return 100 * (trial.quality if labelled else trial.fused_share)

    if calibration.curve:
        points = sorted(calibration.curve, key=lambda t: t.forward_passes)
        axes.plot(
            [t.forward_passes for t in points], [height(t) for t in points], "o-", color="#0072b2", label="gated"
        )
        for trial in points:
            axes.annotate(
                str(trial.settings.get("threshold", "")),
                (trial.forward_passes, height(trial)),
                xytext=(3, 5),
                textcoords="offset points",
                fontsize=8,
            )
    if calibration.rules:
        axes.plot(
            [t.forward_passes for t in calibration.rules],
            [height(t) for t in calibration.rules],
            "s",
            color="#009e73",
            label="always fused",
        )
    for trial in calibration.alone:
        axes.plot(trial.forward_passes, height(trial), "^", color="#d55e00")
        axes.annotate(
            trial.name,
            (trial.forward_passes, height(trial)),
            xytext=(4, -10),
            textcoords="offset points",
            fontsize=8,
        )
    if best := calibration.best_alone:
        axes.axhline(height(best), color="#d55e00", linestyle="--", linewidth=1, label="best member alone")
    if calibration.curve or calibration.rules:
        axes.legend(frameon=False)
    return figure


def reliability(trial: Trial, bins: int = 5) -> list[tuple[float, float, int]]:
    """Answers in groups of equal size by how sure they were: mean sureness, share that is right, and how many."""
    pairs = sorted(zip(trial.sureness, trial.marks, strict=True))
    size = max(1, len(pairs) // bins)
    groups = [pairs[at : at + size] for at in range(0, len(pairs), size)]
    if len(groups) > bins:
        groups[-2:] = [groups[-2] + groups[-1]]
    return [(_mean([s for s, _ in g]), _mean([m for _, m in g]), len(g)) for g in groups]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def reliability_figure(trial: Trial) -> Any:
    """Share of right answers against the least confidence that they were written with."""
    figure, axes = _axes("least confidence in the answer", "right answers, %")
    points = reliability(trial)
    axes.plot([0, 1], [0, 100], color="#999", linewidth=1, linestyle=":", label="as sure as right")
    axes.plot([s for s, _, _ in points], [100 * m for _, m, _ in points], "o-", color="#0072b2", label=trial.name)
    for sure, right, rows in points:
        axes.annotate(f"{rows}", (sure, 100 * right), xytext=(3, 5), textcoords="offset points", fontsize=8)
    axes.set_xlim(0, 1)
    axes.legend(frameon=False)
    return figure
