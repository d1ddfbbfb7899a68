"""MemberConfig -> Member. Members that name the same model share one copy of its weights."""

from __future__ import annotations

from collections.abc import Sequence

from adafuse_engine.config import EngineConfig
from adafuse_engine.members.base import Member

__all__ = ["load_members"]


def load_members(config: EngineConfig) -> Sequence[Member]:
    """Load all members of an ensemble, in order.

    Raises `LoadError`.
    """
    # torch is imported here and not before: scripted and remote members do without it.
    from adafuse_engine.members.local.member import load_local

    return load_local(config)
