"""``adafuse eval``: an ensemble, each of its members alone and what else could be done, on the same rows."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adafuse_engine import EngineConfig, InvalidArgumentError, read_config
from adafuse_engine.config import DEFAULT_MODELS, member_configs
from adafuse_integrations._shared import require

if TYPE_CHECKING:
    from adafuse_integrations.lm_eval.compare import Outcome

__all__ = ["evaluate", "table"]

OURS = ("squad", "triviaqa", "natural_questions", "gsm8k", "flores_de_en")


def evaluate(
    config: Annotated[Path | None, typer.Option(help="A configuration file.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="A member. Repeat for more.")] = None,
    weight: Annotated[list[float] | None, typer.Option("--weight", "-w", help="A member's weight.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help=f"{', '.join(OURS)}, or any task of lm-eval. Repeat for more."),
    ] = None,
    split: Annotated[str, typer.Option(help="Of the five local tasks: test or dev.")] = "test",
    baseline: Annotated[
        list[str] | None, typer.Option("--baseline", "-b", help="paper, unite, rerank, majority. Repeat for more.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the local tasks' JSON lines.")] = None,
    limit: Annotated[int | None, typer.Option(help="Rows per task; by default all.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for answers and results.")] = Path("eval"),
) -> None:
    """Evaluate an ensemble beside each member alone. A run that was stopped goes on where it was."""
    require("lm_eval", "lm-eval", extra="eval")
    if split not in ("test", "dev"):
        raise InvalidArgumentError(f"--split: test or dev (got {split!r:.40})")
    named = model or list(DEFAULT_MODELS)
    ensemble = read_config(config) if config else EngineConfig(members=member_configs(named, weight or []))

    from adafuse_integrations.lm_eval import TASKS
    from adafuse_integrations.lm_eval.compare import compare, systems

    names = [f"adafuse_{t}{'_dev' if split == 'dev' else ''}" if t in OURS else t for t in task or OURS]
    made = systems(ensemble, baseline or [], out / "answers")
    outcomes = compare(made, names, include=TASKS, data=data, limit=limit)
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "split": split,
        "ensemble": ensemble.model_dump(mode="json", exclude_defaults=True),
    }
    document = {"about": about, "outcomes": [o.to_dict() for o in outcomes]}
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = table(outcomes)
    (out / "table.md").write_text(text, encoding="utf-8")
    typer.echo(text)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table in Markdown."""
    lines = [
        "| task | system | metric | mark | 95 % interval | / best member | above it | forwards | fused | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        beside: list[Any] = ["", ""]
        if o.above is not None:
            beside = ["" if o.over_best is None else f"{o.over_best:.3f}", f"{100 * o.above:.0f} %"]
        cells = [
            o.task.removeprefix("adafuse_"),
            o.system,
            o.metric,
            f"{o.mark:.1f}",
            f"{o.low:.1f} to {o.high:.1f}",
            *beside,
            o.forward_passes,
            f"{100 * o.fused_share:.0f} %",
            f"{o.seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    rows = max((o.rows for o in outcomes), default=0)
    return "\n".join([*lines, "", f"{rows} rows per task at most.", ""])
