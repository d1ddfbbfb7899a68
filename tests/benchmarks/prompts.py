"""Prompts to measure with: questions on real passages where they lie beside the repository, else our own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "squad.jsonl"

PASSAGE = (
    "The lighthouse at Kessel Point was built in 1874 by Maria Hagen, who had drawn its lens herself. It stands "
    "forty-one metres above the sea and was lit with whale oil until 1911, when the village laid a cable. Boats "
    "bound for the harbour keep it on their left hand until they see the church. The keeper's house is a museum "
    "now, open from May to September, and has the old clockwork that turned the lens once in ninety seconds. "
)
ASKED = ["Who built the lighthouse?", "When was it built?", "How high does it stand?", "What was it lit with?"]

# Texts that both packaged models go on with in the same way.
AGREED = [
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday,",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
    "the cat sat on the mat. the cat sat on the mat. the cat sat on the mat. the cat sat on",
]


def questions() -> list[tuple[str, str]]:
    """Pairs of passage and question."""
    if DATA.is_file():
        rows = [json.loads(line) for line in DATA.open()]
        return [(r["context"], r["question"]) for r in rows if r["split"] == "dev"]
    return [(PASSAGE, q) for q in ASKED]


def prompt(passage: str, question: str) -> str:
    """As a base model likes to be asked."""
    return f"{passage}\n\nQuestion: {question}\nAnswer:"


def short(count: int) -> list[str]:
    """Questions on one passage each."""
    return [prompt(p, q) for p, q in itertools.islice(itertools.cycle(questions()), count)]


def passage_of(tokenize, tokens: int) -> str:
    """Passages one after the other, cut to about so many tokens."""
    text = ""
    for passage, _ in itertools.cycle(questions()):
        if len(tokenize(text)) >= tokens:
            break
        text += passage + "\n\n"
    words = text.split(" ")
    while len(tokenize(" ".join(words))) > tokens:
        words = words[: int(len(words) * 0.98)]
    return " ".join(words)
