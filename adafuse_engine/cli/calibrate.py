"""``adafuse calibrate``: threshold and weights from a file of prompts, written as a configuration and a report."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from adafuse_engine.cache import cache_folder
from adafuse_engine.calibration.calibrate import Calibration, calibrate
from adafuse_engine.calibration.marks import MARKS
from adafuse_engine.calibration.report import write_report
from adafuse_engine.calibration.trials import Lab, read_rows
from adafuse_engine.cli.generate import unescape
from adafuse_engine.config import DEFAULT_MODELS, EngineConfig, member_configs
from adafuse_engine.configfile import read_config, write_config
from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.members.pool import load_members
from adafuse_engine.members.remembering import Memory, remembering

__all__ = ["calibrate_command"]


def calibrate_command(
    data: Annotated[Path, typer.Argument(help="JSON lines with prompt and, if known, answers.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The configuration to write.")] = Path("adafuse.toml"),
    report: Annotated[Path | None, typer.Option(help="An HTML page to write; needs the extra calibrate.")] = None,
    config: Annotated[Path | None, typer.Option(help="A configuration to start from, in place of --model.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="A member. Repeat for more.")] = None,
    weight: Annotated[list[float] | None, typer.Option("--weight", "-w", help="Weights to start from.")] = None,
    mark: Annotated[str, typer.Option(help=f"How answers are marked: {', '.join(MARKS)}.")] = "exact_match",
    most_fused: Annotated[float | None, typer.Option(help="At most this share of words is fused.")] = None,
    most_cost: Annotated[
        float | None, typer.Option(help="At most this share of the forwards that always fusing takes.")
    ] = None,
    keep_ensemble: Annotated[
        bool, typer.Option("--keep-ensemble", help="Write an ensemble even where the best member alone is better.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    stop: Annotated[list[str] | None, typer.Option(help=r"End answers before this string, e.g. \n.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use so many rows.")] = None,
    remember: Annotated[
        bool, typer.Option(help="Keep what the models said in the cache folder: a second run is quick.")
    ] = True,
) -> None:
    """Find threshold and weights for DATA; say whether an ensemble is better than one member; write a config."""
    if mark not in MARKS:
        raise InvalidArgumentError(f"--mark: one of {', '.join(MARKS)} (got {mark!r:.40})")
    rows = read_rows(data, limit)
    start = read_config(config) if config else None
    members = start.members if start else member_configs(model or list(DEFAULT_MODELS), weight or [])
    ensemble = start or EngineConfig(members=members)
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if stop:
        options["stop"] = [unescape(s) for s in stop]
    base = ensemble.decoding.override(**options)
    memory = Memory(cache_folder() / "remembered" if remember else None)
    loaded = load_members(ensemble)
    try:
        lab = Lab(
            [remembering(m, memory, c) for m, c in zip(loaded, members, strict=True)], rows, MARKS[mark], base
        )
        done = calibrate(
            lab,
            [m.weight for m in members],
            most_fused=most_fused,
            most_cost=most_cost,
            keep_ensemble=keep_ensemble,
            told=lambda line: typer.echo(line),
        )
    finally:
        for member in loaded:
            member.close()
    typer.echo(f"\n{done.verdict}")
    write_config(out, _chosen(ensemble, base, done), _about(data, len(rows), mark, done))
    typer.echo(f"Written: {out}")
    if report:
        write_report(report, done, f"Calibration on {data.name}")
        typer.echo(f"Written: {report}")


def _chosen(ensemble: EngineConfig, base: Any, done: Calibration) -> EngineConfig:
    """The ensemble with what was chosen; of a single member nothing but its name and the settings of the text."""
    chosen = done.chosen
    shares = dict(zip(chosen.members, chosen.weights, strict=True))
    members = tuple(
        m.model_copy(update={"weight": 1.0 if len(shares) == 1 else round(shares[m.label], 3)})
        for m in ensemble.members
        if shares.get(m.label, 0) > 0
    )
    return ensemble.model_copy(update={"members": members, "decoding": base.override(**chosen.settings)})


def _about(data: Path, rows: int, mark: str, done: Calibration) -> dict[str, Any]:
    about: dict[str, Any] = {
        "made_by": "adafuse calibrate",
        "date": datetime.date.today(),
        "data": data.name,
        "rows": rows,
        "verdict": done.verdict,
    }
    if not math.isnan(done.chosen.quality):
        about[mark] = round(100 * done.chosen.quality, 2)
    return about
