"""The members of one request, and how they are asked side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from adafuse_engine.members.base import Session

__all__ = ["Voice", "together"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Voice:
    """A member in a request: its name, its share of the vote (shares sum to 1), its session."""

    name: str
    weight: float
    session: Session


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results in order; one failure cancels the others.

    The first error is raised as itself, not wrapped in a group.
    """
    coroutines = list(calls)
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [t.result() for t in tasks]
