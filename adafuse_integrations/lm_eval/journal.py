"""Answers written down as they come, so that an evaluation that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adafuse_engine import Completion

__all__ = ["Answer", "Journal", "answer_of"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a system wrote, and what that cost: forwards of all members, rounds, rounds that scores decided."""

    text: str
    forward_passes: int = 0
    rounds: int = 0
    fused: int = 0
    seconds: float = 0.0


def answer_of(completion: Completion, seconds: float = 0.0, more: Sequence[Completion] = ()) -> Answer:
    """A completion's answer; the cost is that of ``more`` completions as well."""
    all_ = [completion, *more]
    rounds = [r for c in all_ for r in c.trace.rounds]
    return Answer(
        completion.text,
        sum(m.forward_passes for c in all_ for m in c.usage.members),
        len(rounds),
        sum(r.fused for r in rounds),
        seconds,
    )


class Journal:
    """A file of JSON lines, one per answer; without a path, memory alone. A line that a kill cut is dropped."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Answer] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    key = entry.pop("key")
                    self._known[key] = Answer(**entry)
                except (ValueError, KeyError, TypeError):
                    continue

    def __len__(self) -> int:
        return len(self._known)

    def find(self, prompt: str, options: Mapping[str, Any]) -> Answer | None:
        """The answer to the same prompt with the same options, if it was written."""
        return self._known.get(_key(prompt, options))

    def add(self, prompt: str, options: Mapping[str, Any], answer: Answer) -> None:
        """Write an answer down."""
        key = _key(prompt, options)
        self._known[key] = answer
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **asdict(answer)}, ensure_ascii=False) + "\n")


def _key(prompt: str, options: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([prompt, options], sort_keys=True).encode()).hexdigest()[:24]
