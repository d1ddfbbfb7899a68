"""Trying settings on rows of prompts: what each writes, how right that is, what it costs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adafuse_engine.config import DecodingConfig
from adafuse_engine.engine import Engine
from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.members.base import Member
from adafuse_engine.scoring import TextScore
from adafuse_engine.types import Completion

__all__ = ["Lab", "Row", "Trial", "read_rows"]

Mark = Callable[[str, Sequence[str]], float]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, and the answers that would be right; none if nobody knows."""

    prompt: str
    answers: tuple[str, ...] = ()


def read_rows(path: str | Path, limit: int | None = None) -> list[Row]:
    """Rows from a file of JSON lines with ``prompt`` and, if known, ``answers`` (or one ``answer``).

    Raises `InvalidArgumentError` for a file that is missing, empty or holds something else, with its line.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path}: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_row(line, f"{path}, line {number}"))
    if not rows:
        raise InvalidArgumentError(f"{path} holds no rows")
    if len({bool(row.answers) for row in rows}) > 1:
        raise InvalidArgumentError(f"{path}: either all rows have answers or none")
    return rows[:limit]


def _row(line: str, place: str) -> Row:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{place} is no JSON: {error}") from error
    prompt = data.get("prompt") if isinstance(data, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise InvalidArgumentError(f"{place} has no prompt")
    answers = data.get("answers", data.get("answer", ()))
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list | tuple) or not all(isinstance(a, str) and a.strip() for a in answers):
        raise InvalidArgumentError(f"{place}: answers are a list of texts, or answer is one")
    return Row(prompt, tuple(answers))


@dataclass(frozen=True, slots=True)
class Trial:
    """What one setting did on all rows.

    ``marks``: how right each answer is, from 0 to 1; empty without known answers. ``sureness``: the least
    confidence that each answer was written with. ``fused_share``: of all words, those that scores decided.
    """

    name: str
    settings: Mapping[str, Any]
    weights: tuple[float, ...]
    texts: tuple[str, ...]
    marks: tuple[float, ...]
    sureness: tuple[float, ...]
    forward_passes: int
    fused_share: float
    members: tuple[str, ...] = field(default=())

    @property
    def quality(self) -> float:
        """The mean of the marks; NaN without any."""
        return statistics.fmean(self.marks) if self.marks else float("nan")


class Lab:
    """Members and rows; every setting is tried on the same ones. Members may remember what their models said."""

    def __init__(
        self, members: Sequence[Member], rows: Sequence[Row], mark: Mark, base: DecodingConfig | None = None
    ) -> None:
        self.members = tuple(members)
        self.names = tuple(m.name for m in members)
        self.rows = tuple(rows)
        self.mark = mark
        self.base = base or DecodingConfig()

    @property
    def labelled(self) -> bool:
        """Whether it is known what would be right."""
        return bool(self.rows[0].answers)

    def score(self) -> list[TextScore]:
        """What the members think of each row's first answer and its end."""
        # As it would be written after a prompt: behind a space, unless one is there.
        pairs = [(r.prompt, r.answers[0] if r.prompt[-1:].isspace() else f" {r.answers[0]}") for r in self.rows]
        with Engine(members=self.members) as engine:
            return engine.score_batch(pairs, end=not self.base.stop)

    def run(
        self,
        name: str,
        weights: Sequence[float],
        *,
        only: Sequence[str] = (),
        **settings: Any,
    ) -> Trial:
        """Try one setting. ``only``: names of the members that take part; all by default."""
        taken = [m for m in self.members if not only or m.name in only]
        shares = [w for w, m in zip(weights, self.members, strict=True) if m in taken]
        with Engine(members=taken, weights=shares, decoding=self.base) as engine:
            done = engine.generate_batch([row.prompt for row in self.rows], **settings)
            shares = list(engine.weights)
        texts = tuple(c.text for c in done)
        marks = [self.mark(t, row.answers) for t, row in zip(texts, self.rows, strict=True) if row.answers]
        return Trial(
            name,
            settings,
            tuple(shares),
            texts,
            tuple(marks),
            tuple(_sureness(c) for c in done),
            sum(m.forward_passes for c in done for m in c.usage.members),
            _fused_share(done),
            tuple(m.name for m in taken),
        )


def _sureness(completion: Completion) -> float:
    return min((r.certainty for r in completion.trace.rounds), default=0.0)


def _fused_share(done: Sequence[Completion]) -> float:
    rounds = [r for c in done for r in c.trace.rounds]
    words = sum(r.words for r in rounds)
    return sum(r.words for r in rounds if r.fused) / words if words else 0.0
