"""Bits per byte of the right answers of the local tasks: members, and their mixture with weights learned on dev.

``python -m adafuse_integrations.lm_eval.bits --limit 60`` prints a table. Nothing is decoded: the quickest look at
whether members know different things.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from adafuse_engine import Engine
from adafuse_engine.calibration import bits_per_byte, learn_weights
from adafuse_engine.config import DEFAULT_MODELS
from adafuse_integrations.lm_eval.tasks import questions

__all__ = ["SHOTS", "bits", "gold_pairs"]

SHOTS: dict[str, tuple[Any, Any, int]] = {
    "squad": (questions.passage_question, questions.first_answer, 3),
    "triviaqa": (questions.question, questions.first_answer, 5),
    "natural_questions": (questions.question, questions.first_answer, 5),
    "gsm8k": (questions.problem, questions.rationale, 3),
    "flores_de_en": (questions.german, questions.english, 4),
}
"""Of each task: prompt, right answer, few-shot examples; as in the task definitions."""


def gold_pairs(task: str, split: str, data: str | None, limit: int | None) -> list[tuple[str, str]]:
    """Few-shot prompts and what should follow them."""
    ask, gold, shots = SHOTS[task]
    rows = questions.read(task, data)
    head = "".join(f"{ask(row)} {gold(row)}\n\n" for row in rows["shots"][:shots])
    return [(head + ask(row), f" {gold(row)}") for row in rows[split][:limit]]


def bits(engine: Engine, task: str, data: str | None = None, limit: int | None = None) -> dict[str, float]:
    """Bits per byte on test, by member and for the ``mixture``; and the weights of the mixture, learned on dev."""
    dev, test = (engine.score_batch(gold_pairs(task, split, data, limit)) for split in ("dev", "test"))
    learned = learn_weights(dev)
    alone = {name: bits_per_byte(test, [float(name == other) for other in learned]) for name in learned}
    weights = {f"weight of {name}": weight for name, weight in learned.items()}
    return alone | {"mixture": bits_per_byte(test, list(learned.values()))} | weights


def main(
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="A member. Repeat for more.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Repeat for more; all by default.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the rows.")] = None,
    limit: Annotated[int | None, typer.Option(help="Rows per split.")] = None,
) -> None:
    """Print the table."""
    names = model or DEFAULT_MODELS
    with Engine.from_models(names) as engine:
        for number, one in enumerate(task or SHOTS):
            found = bits(engine, one, None if data is None else str(data), limit)
            if not number:
                print(f"| task | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
            print(f"| {one} | {' | '.join(f'{value:.3f}' for value in found.values())} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
