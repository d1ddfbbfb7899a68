"""Several systems on the same rows: each member alone, the ensemble, what else could be done; with intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from adafuse_engine import DecodingConfig, Engine, EngineConfig, InvalidArgumentError
from adafuse_integrations.lm_eval.baselines import MajorityLM, RerankLM
from adafuse_integrations.lm_eval.model import AdaFuseLM

__all__ = ["BASELINES", "Outcome", "compare", "intervals", "systems"]

BASELINES = ("paper", "unite", "rerank", "majority")
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one system did on one task.

    ``marks``: by metric, in percent or the metric's own points. ``low``, ``high``: the ends of its 95 % interval,
    from resampled rows. ``over_best``: the mark divided by the best single member's; ``above``: how often it was
    above it in resampled rows; both None for members.
    """

    system: str
    task: str
    rows: int
    metric: str
    mark: float
    low: float
    high: float
    over_best: float | None
    above: float | None
    forward_passes: int
    fused_share: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def systems(
    config: EngineConfig, baselines: Sequence[str], folder: Path | None
) -> dict[str, Callable[[], AdaFuseLM]]:
    """Every system by name: ``member:NAME`` each, ``ensemble``, and the baselines that are asked for.

    Raises `InvalidArgumentError` for an unknown baseline.
    """
    for name in baselines:
        if name not in BASELINES:
            raise InvalidArgumentError(f"baseline: one of {', '.join(BASELINES)} (got {name!r:.40})")
    alone = [
        EngineConfig(members=(member,), decoding=DecodingConfig(), progress=config.progress)
        for member in config.members
    ]

    def at(name: str) -> dict[str, Any]:
        return {} if folder is None else {"journal": folder / f"{name}.jsonl"}

    def ensemble(name: str, **settings: Any) -> Callable[[], AdaFuseLM]:
        # The paper has no weights; nor has what others publish.
        equal = EngineConfig(
            members=tuple(m.model_copy(update={"weight": 1.0}) for m in config.members), progress=config.progress
        )
        engine = equal if settings else config
        chosen = settings or config.decoding.model_dump()
        return lambda: AdaFuseLM(engine=Engine.shared(engine), **at(name), **chosen)

    made: dict[str, Callable[[], AdaFuseLM]] = {
        f"member:{one.members[0].label}": (
            lambda one=one: AdaFuseLM(engine=Engine.shared(one), **at(f"member-{one.members[0].label}"))  # type: ignore[misc]
        )
        for one in alone
    }
    made["ensemble"] = ensemble("ensemble")
    makers: dict[str, Callable[[], AdaFuseLM]] = {
        "paper": ensemble("paper", preset="paper"),
        "unite": ensemble("unite", preset="unite"),
        "rerank": lambda: RerankLM(Engine.shared(config), [Engine.shared(one) for one in alone], **at("rerank")),
        "majority": lambda: MajorityLM(Engine.shared(_heaviest(config, alone)), **at("majority")),
    }
    return made | {name: makers[name] for name in baselines}


def _heaviest(config: EngineConfig, alone: Sequence[EngineConfig]) -> EngineConfig:
    """The member that is trusted most, alone."""
    weights = [member.weight for member in config.members]
    return alone[weights.index(max(weights))]


def compare(
    made: Mapping[str, Callable[[], AdaFuseLM]],
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Run every system on every task, in order. Answers that a journal holds are not written again.

    ``include``: a folder of task definitions beside lm-eval's own. ``data``: where the local tasks' rows are.
    """
    metadata = {} if data is None else {"data": str(data)}
    # lm-eval's own tasks are thousands of files: they are looked through only for one of them.
    ours = include is not None and all((include / f"{t.removeprefix('adafuse_')}.yaml").exists() for t in tasks)
    manager = TaskManager(
        include_path=None if include is None else str(include), include_defaults=not ours, metadata=metadata
    )
    outcomes = []
    for task in tasks:
        samples: dict[str, tuple[AdaFuseLM, list[dict[str, Any]]]] = {}
        for name, make in made.items():
            lm = make()
            lm.answers.clear()
            done = simple_evaluate(lm, tasks=[task], limit=limit, task_manager=manager, bootstrap_iters=0)
            samples[name] = lm, done["samples"][task]
        outcomes += _outcomes(task, samples, seed)
    return outcomes


def _outcomes(task: str, samples: Mapping[str, tuple[AdaFuseLM, list[dict[str, Any]]]], seed: int) -> list[Outcome]:
    metrics = samples[next(iter(samples))][1][0]["metrics"]
    found = []
    for metric in metrics:
        rows = {name: [sample[metric] for sample in done] for name, (_, done) in samples.items()}
        aggregate = _aggregate(metric)
        marks = {name: aggregate(values) for name, values in rows.items()}
        members = [name for name in rows if name.startswith("member:")]
        best = max(members, key=marks.__getitem__)
        drawn = intervals(rows, aggregate, seed)
        for name, (lm, _) in samples.items():
            sorted_ = sorted(drawn[name])
            alone = name in members
            answers = lm.answers
            rounds = sum(a.rounds for a in answers)
            found.append(
                Outcome(
                    name,
                    task,
                    len(rows[name]),
                    metric,
                    marks[name],
                    sorted_[int(0.025 * len(sorted_))],
                    sorted_[int(0.975 * len(sorted_))],
                    None if alone or not marks[best] else marks[name] / marks[best],
                    None
                    if alone
                    else statistics.fmean(a > b for a, b in zip(drawn[name], drawn[best], strict=True)),
                    sum(a.forward_passes for a in answers),
                    sum(a.fused for a in answers) / rounds if rounds else 0.0,
                    sum(a.seconds for a in answers),
                )
            )
    return found


def _aggregate(metric: str) -> Callable[[Sequence[Any]], float]:
    if metric in ("bleu", "chrf"):
        import sacrebleu

        score = getattr(sacrebleu, f"corpus_{metric}")
        return lambda pairs: float(score([said for _, said in pairs], [[wanted for wanted, _ in pairs]]).score)
    return lambda values: 100 * statistics.fmean(values)


def intervals(
    rows: Mapping[str, Sequence[Any]], aggregate: Callable[[Sequence[Any]], float], seed: int = 0
) -> dict[str, list[float]]:
    """Each system's mark on the same resampled rows, so that they can be compared draw by draw."""
    size = len(next(iter(rows.values())))
    # Corpus marks take longer to compute than means do.
    times = RESAMPLES if isinstance(next(iter(rows.values()))[0], float | int) else RESAMPLES // 5
    draw = random.Random(seed)
    chosen = [[draw.randrange(size) for _ in range(size)] for _ in range(times)]
    return {name: [aggregate([values[i] for i in which]) for which in chosen] for name, values in rows.items()}
