"""Which setting makes answers better: one factor at a time, on dev rows, every setting on the same rows.

``python tests/benchmarks/quality.py --data DATA --out FOLDER`` tries the settings below on the five tasks and
prints, per task and setting, the mark, its interval, how often it beats the best member on resampled rows, and the
forwards beside that member's. What the models said is kept in the cache folder, so another setting computes only
what is new. Marks: exact match (SQuAD, TriviaQA, Natural Questions), the last number (GSM8K), the mean chrF of a
sentence (FLORES).
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from adafuse_engine import DecodingConfig, Engine, EngineConfig
from adafuse_engine.cache import cache_folder
from adafuse_engine.calibration import bits_per_byte, learn_weights
from adafuse_engine.calibration.calibrate import chance_above
from adafuse_engine.calibration.marks import exact_match, number_match
from adafuse_engine.calibration.trials import Lab, Row, Trial
from adafuse_engine.config import DEFAULT_MODELS, member_configs
from adafuse_engine.members.pool import load_members
from adafuse_engine.members.remembering import Memory, remembering
from adafuse_integrations.lm_eval.bits import SHOTS
from adafuse_integrations.lm_eval.tasks import questions

MAX_TOKENS = {"squad": 24, "triviaqa": 16, "natural_questions": 16, "gsm8k": 160, "flores_de_en": 80}
GRID: dict[str, dict[str, Any]] = {
    "default": {},
    "mix arithmetic": {"mix": "arithmetic"},
    "weights 1:3": {"w": "1:3"},
    "weights 1:3, arithmetic": {"w": "1:3", "mix": "arithmetic"},
    "learned weights": {"w": "learned"},
    "learned weights, arithmetic": {"w": "learned", "mix": "arithmetic"},
    "weights from the prompt": {"w": "prompt"},
    "weights from the prompt, arithmetic": {"w": "prompt", "mix": "arithmetic"},
    "bits_per_byte": {"fusion": "bits_per_byte"},
    "bits_per_byte, learned weights": {"fusion": "bits_per_byte", "w": "learned"},
    "vote": {"fusion": "vote", "mix": "arithmetic"},
    "vote, learned weights": {"fusion": "vote", "mix": "arithmetic", "w": "learned"},
    "paper": {"preset": "paper"},
    "paper, learned weights": {"preset": "paper", "w": "learned"},
    "unite": {"preset": "unite"},
    "branches 5": {"branches": 5},
    "max_words 1": {"max_words": 1},
    "confidence entropy": {"confidence": "entropy"},
    "nucleus": {"scaling": "nucleus"},
    "adaptive weights 1": {"adaptive_weights": 1.0},
    "gated at 0.3": {"gate": "any_certain", "threshold": 0.3},
    "gated at 0.5": {"gate": "any_certain", "threshold": 0.5},
    "gated at 0.7": {"gate": "any_certain", "threshold": 0.7},
    "gated at 0.9": {"gate": "any_certain", "threshold": 0.9},
    "learned, arithmetic, gated at 0.5": {
        "w": "learned", "mix": "arithmetic", "gate": "any_certain", "threshold": 0.5
    },
}  # fmt: skip
VIEWED = ("squad", "triviaqa")


def rows_of(task: str, split: str, data: str | None, limit: int, rotate: int = 0) -> list[Row]:
    """Few-shot prompts with all the right answers; ``rotate`` turns the order of the examples."""
    ask, gold, shots = SHOTS[task]
    rows = questions.read(task, data)
    shown = rows["shots"][:shots]
    shown = shown[rotate:] + shown[:rotate]
    head = "".join(f"{ask(row)} {gold(row)}\n\n" for row in shown)
    answers = {"flores_de_en": lambda r: [r["target"]]}.get(task, lambda r: r["answers"])
    return [Row(head + ask(r), tuple(map(str, answers(r)))) for r in rows[split][:limit]]


def gold_of(task: str, split: str, data: str | None, limit: int) -> list[str]:
    return [f" {SHOTS[task][1](row)}" for row in questions.read(task, data)[split][:limit]]


def chrf(text: str, gold: Sequence[str]) -> float:
    import sacrebleu

    return float(sacrebleu.sentence_chrf(text.strip(), list(gold)).score) / 100


def mark_of(task: str) -> Any:
    return {"gsm8k": number_match, "flores_de_en": chrf}.get(task, exact_match)


def interval(marks: Sequence[float], times: int = 1000) -> tuple[float, float]:
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(marks, k=len(marks))) for _ in range(times))
    return means[int(0.025 * times)], means[int(0.975 * times)]


class Study:
    """One task: trials on its dev rows, a line printed for each."""

    def __init__(self, task: str, members: Sequence[Any], data: str | None, limit: int, split: str) -> None:
        self.task = task
        self.rows = rows_of(task, split, data, limit)
        base = DecodingConfig(max_tokens=MAX_TOKENS[task], stop=("\n",))
        self.lab = Lab(members, self.rows, mark_of(task), base)
        self.base = base
        pairs = [(r.prompt, g) for r, g in zip(self.rows, gold_of(task, split, data, limit), strict=True)]
        with Engine(members=members) as engine:
            self.scores = engine.score_batch(pairs)
        self.learned = list(learn_weights(self.scores).values())
        self.trials: list[Trial] = []
        self.best: Trial | None = None

    def told(self, trial: Trial, seconds: float) -> None:
        self.trials.append(trial)
        low, high = interval(trial.marks)
        line = f"| {self.task} | {trial.name} | {100 * trial.quality:.1f} | {100 * low:.1f} to {100 * high:.1f} |"
        if self.best is not None:
            above = chance_above(trial.marks, self.best.marks)
            cost = trial.forward_passes / self.best.forward_passes
            line += f" {100 * above:.0f} % | {cost:.2f} | {100 * trial.fused_share:.0f} % |"
        else:
            line += f"  |  | {trial.forward_passes} forwards |"
        print(f"{line} {seconds:.0f} s |", flush=True)

    def alone(self) -> None:
        tried = [self.timed(f"{n} alone", [1.0] * len(self.lab.names), only=[n]) for n in self.lab.names]
        self.best = max(tried, key=lambda t: t.quality)
        bits = {n: bits_per_byte(self.scores, [float(n == o) for o in self.lab.names]) for n in self.lab.names}
        bits |= {"learned mixture": bits_per_byte(self.scores, self.learned)}
        print(f"  learned weights {[round(w, 3) for w in self.learned]}; bits per byte {bits}", flush=True)

    def timed(self, name: str, weights: Sequence[float], **options: Any) -> Trial:
        start = time.perf_counter()
        trial = self.lab.run(name, weights, **options)
        self.told(trial, time.perf_counter() - start)
        return trial

    def setting(self, name: str, options: dict[str, Any]) -> None:
        options = dict(options)
        kind = options.pop("w", "equal")
        if kind == "prompt":
            self.by_prompt(name, options)
        else:
            self.timed(name, {"equal": [1, 1], "1:3": [1, 3], "learned": self.learned}[kind], **options)

    def by_prompt(self, name: str, options: dict[str, Any]) -> None:
        """Weights from each member's likelihood of the row's own prompt, per byte (the idea of PackLLM)."""
        start = time.perf_counter()
        names = self.lab.names
        with Engine(members=self.lab.members) as engine:
            told = engine.score_batch([("", row.prompt) for row in self.rows])
        trials = []
        for row, score in zip(self.rows, told, strict=True):
            rates = [sum(score.members[n]) / score.bytes for n in names]
            # Per word of five bytes, so that the temperature of the softmax is about that of a token.
            shares = [math.exp(5 * (r - max(rates))) for r in rates]
            lab = Lab(self.lab.members, [row], self.lab.mark, self.base)
            trials.append(lab.run(name, shares, **options))
        self.told(joined(trials), time.perf_counter() - start)

    def views(self, data: str | None, limit: int, split: str, member: Any, make: Any) -> None:
        """Three orders of the few-shot examples for one model, alone and fused; five samples of it beside."""
        names = [f"view{i}" for i in range(3)]
        rows = [rows_of(self.task, split, data, limit, rotate=i) for i in range(3)]
        labs = [Lab([make(n)], r, self.lab.mark, self.base) for n, r in zip(names, rows, strict=True)]
        for name, lab in zip(names, labs, strict=True):
            start = time.perf_counter()
            self.told(replace(lab.run(f"{member.name}, {name}", [1.0])), time.perf_counter() - start)
        for mix in ("geometric", "arithmetic"):
            start = time.perf_counter()
            with Engine(members=[make(n) for n in names], decoding=self.base) as engine:
                prompts = [{n: rows[i][k].prompt for i, n in enumerate(names)} for k in range(len(self.rows))]
                done = engine.generate_batch(prompts, mix=mix)
            marks = [self.lab.mark(c.text, r.answers) for c, r in zip(done, self.rows, strict=True)]
            forwards = sum(m.forward_passes for c in done for m in c.usage.members)
            trial = Trial(
                f"{member.name}, three views, {mix}", {}, (), tuple(c.text for c in done), tuple(marks), (),
                forwards, 1.0,
            )  # fmt: skip
            self.told(trial, time.perf_counter() - start)


def joined(trials: Sequence[Trial]) -> Trial:
    first = trials[0]
    return replace(
        first,
        weights=(),
        texts=tuple(t.texts[0] for t in trials),
        marks=tuple(t.marks[0] for t in trials),
        sureness=(),
        forward_passes=sum(t.forward_passes for t in trials),
        fused_share=statistics.fmean(t.fused_share for t in trials),
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder for the trials.")] = Path("quality"),
    task: Annotated[list[str] | None, typer.Option("--task", "-t")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Settings by name; all by default.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the rows.")] = None,
    limit: Annotated[int, typer.Option(help="Rows per task.")] = 60,
    split: Annotated[str, typer.Option(help="dev or test.")] = "dev",
    views: Annotated[bool, typer.Option(help="Also views of the last member (SQuAD, TriviaQA).")] = True,
) -> None:
    """Try the settings."""
    configs = member_configs(list(DEFAULT_MODELS), [])
    loaded = load_members(EngineConfig(members=configs))
    memory = Memory(cache_folder() / "remembered")
    members = [remembering(m, memory, c) for m, c in zip(loaded, configs, strict=True)]

    def viewed(name: str) -> Any:
        one = remembering(loaded[-1], memory, configs[-1])
        one.name = name
        return one

    where = None if data is None else str(data)
    out.mkdir(parents=True, exist_ok=True)
    print("| task | setting | mark | 95 % interval | above best member | forwards / its | fused | time |")
    print("|---|---|---|---|---|---|---|---|")
    for one in task or SHOTS:
        study = Study(one, members, where, limit, split)
        study.alone()
        for name, options in GRID.items():
            if not only or name in only:
                study.setting(name, options)
        if views and one in VIEWED:
            study.views(where, limit, split, loaded[-1], viewed)
        (out / f"{one}.json").write_text(json.dumps([asdict(t) for t in study.trials], ensure_ascii=False))


if __name__ == "__main__":
    typer.run(main)
