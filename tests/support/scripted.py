"""Ensembles without weights, and waiting for what happens on the engine's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from adafuse_engine import Engine, EngineConfig
from adafuse_engine.testing import ScriptedMember

HARD_TEXT = (
    ' Here:\n\n```python\ndef f(x):\n\treturn  x + 1\n\n\n    # "done"...\n```\n\t- naïve — 42 % !\n'
    "你好，世界。这是一个测试。 👩🏽‍💻🎉 fin"
)

ENDLESS: dict[str, Any] = {"answer": " word and another one" * 500, "context_window": 100_000, "delay": 0.01}
"""For `Make`: an answer that takes longer to write than `wait_for` waits, given ``max_tokens=NO_LIMIT``."""

NO_LIMIT = 100_000

Make = Callable[..., tuple[Engine, ScriptedMember, ScriptedMember]]


def make_ensembles() -> Iterator[Make]:
    """For a fixture: a function that makes an engine of two members that write the same answer."""
    engines = []

    def make(
        answer: str | Callable[[str], str] = " Paris is the capital.", **options: Any
    ) -> tuple[Engine, ScriptedMember, ScriptedMember]:
        members = [ScriptedMember(name, answer, **options) for name in ("a", "b")]
        engines.append(Engine(members=members))
        return engines[-1], *members

    yield make
    for engine in engines:
        engine.close()


def script_loading(
    monkeypatch: pytest.MonkeyPatch, answer: str | Callable[[str], str] = " Paris is the capital."
) -> list[EngineConfig]:
    """Make engines load scripted members; returns the list of the configs that were loaded."""
    loaded: list[EngineConfig] = []

    def load(config: EngineConfig) -> list[ScriptedMember]:
        loaded.append(config)
        return [ScriptedMember(member.label, answer) for member in config.members]

    monkeypatch.setattr("adafuse_engine.engine.load_members", load)
    monkeypatch.setattr(Engine, "_shared", {})
    return loaded


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for the engine's thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("waited too long")
        time.sleep(0.005)


async def await_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """`wait_for` that leaves the event loop free."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("waited too long")
        await asyncio.sleep(0.005)
