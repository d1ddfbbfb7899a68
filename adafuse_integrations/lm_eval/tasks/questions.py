"""What the task definitions share: rows from a folder of JSON lines, prompts, and how answers are marked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adafuse_engine import InvalidArgumentError
from adafuse_engine.calibration.marks import exact_match, f1, number_match

FOLDER = "ADAFUSE_EVAL_DATA"
SHOTS_FROM = 24
"""Rows at the head of the dev split that few-shot examples are taken from; they are not asked."""


def folder(data: str | None = None) -> Path:
    """Where the rows are: as given, or as the environment variable says, or beside the working folder."""
    return Path(data or os.environ.get(FOLDER) or "../shared/data")


def read(name: str, data: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """The rows of one task by split: ``shots``, ``dev``, ``test``.

    Of the first dev rows the shortest come first among the shots, so that few-shot prompts stay short.
    """
    path = folder(data) / f"{name}.jsonl"
    if not path.exists():
        raise InvalidArgumentError(
            f"{path} does not exist; say where the rows are with --data, {FOLDER}, or lm-eval's metadata data=..."
        )
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    dev = [row for row in rows if row["split"] == "dev"]
    shots = sorted(dev[:SHOTS_FROM], key=lambda row: len(json.dumps(row)))
    return {"shots": shots, "dev": dev[SHOTS_FROM:], "test": [row for row in rows if row["split"] == "test"]}


def dataset(name: str, data: str | None = None, **_: Any) -> Any:
    """`read`, as lm-eval wants it."""
    from datasets import Dataset, DatasetDict

    return DatasetDict({split: Dataset.from_list(rows) for split, rows in read(name, data).items()})


# ---- prompts and targets


def passage_question(row: Mapping[str, Any]) -> str:
    """A passage and a question about it."""
    return f"Passage: {row['context']}\nQuestion: {row['question']}\nAnswer:"


def question(row: Mapping[str, Any]) -> str:
    """A question, as a sentence."""
    text = row["question"].strip()
    return f"Question: {text[:1].upper()}{text[1:]}{'' if text.endswith('?') else '?'}\nAnswer:"


def problem(row: Mapping[str, Any]) -> str:
    """A question as it stands."""
    return f"Question: {row['question']}\nAnswer:"


def german(row: Mapping[str, Any]) -> str:
    """A German sentence, to be put into English."""
    return f"German: {row['source']}\nEnglish:"


def first_answer(row: Mapping[str, Any]) -> str:
    """The answer that stands first."""
    return str(row["answers"][0])


def rationale(row: Mapping[str, Any]) -> str:
    """On one line, its last words the answer."""
    steps = " ".join(line.strip() for line in row["rationale"].splitlines())
    return re.sub(r"\s*Therefore, the answer is.*$", "", steps) + f" The answer is {row['answers'][0]}."


def english(row: Mapping[str, Any]) -> str:
    """The translation."""
    return str(row["target"])


# ---- marks


def mark_answer(row: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Exact match and F1 of a short answer."""
    return {"exact_match": exact_match(results[0], row["answers"]), "f1": f1(results[0], row["answers"])}


def mark_number(row: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the last number is the right one."""
    return {"exact_match": number_match(results[0], row["answers"])}


def mark_translation(row: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """Both are of a whole corpus: pairs that are gathered first."""
    pair = (row["target"], results[0].strip())
    return {"bleu": pair, "chrf": pair}
