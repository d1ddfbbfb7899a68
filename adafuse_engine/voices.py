"""The members of one request."""

from __future__ import annotations

from dataclasses import dataclass

from adafuse_engine.members.base import Session

__all__ = ["Voice"]


@dataclass(frozen=True, slots=True)
class Voice:
    """A member in a request: its name, its share of the vote (shares sum to 1), its session."""

    name: str
    weight: float
    session: Session
