"""What a remote member asks, in whatever words its server understands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from adafuse_engine.errors import UnavailableError

__all__ = ["Dialect", "Facts", "Look", "Sight", "bad_answer"]


@dataclass(frozen=True, slots=True)
class Look:
    """What is asked: what follows these token ids.

    ``ask``: tokens whose log-probability is wanted whatever it is. ``ahead``: tokens that the server may write
    greedily on the way, telling what follows each; 0 if only ``ask`` is wanted.
    """

    ids: tuple[int, ...]
    ask: tuple[int, ...] = ()
    ahead: int = 1


@dataclass(slots=True)
class Sight:
    """What was told.

    ``tops[i]`` maps the most probable tokens after ``ids + tokens[:i]`` to log-probabilities, in nats, before any
    penalty or temperature; ``asked`` does so with the tokens that were asked for.
    """

    tokens: list[int] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    asked: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself: its model's name, where its files are, how long texts may be."""

    model: str
    source: str | None = None
    context_window: int | None = None


class Dialect(Protocol):
    """One kind of server."""

    name: str
    most_top: int
    """Most probable tokens that its servers tell unless they are started otherwise."""
    asks_freely: bool
    """Whether a token that is asked for costs next to nothing beside the look itself."""
    tolerance: float
    """By how much the same log-probability may differ between two requests, in nats."""

    async def facts(self) -> Facts:
        """What the server says of itself; raises `MemberError` where it is another kind of server."""
        ...

    async def look(self, looks: Sequence[Look], top: int) -> list[Sight]:
        """Answer questions, in order, in as few requests as the server allows."""
        ...

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's own ids of a text, no special tokens added; None where it cannot tell."""
        ...


def bad_answer(member: str, what: str, answer: Any) -> NoReturn:
    """Raise `UnavailableError` for an answer that does not hold what was asked for."""
    shown = " ".join(repr(answer).split())[:200]
    raise UnavailableError(member, f"its server's answer has no {what}: {shown}")
