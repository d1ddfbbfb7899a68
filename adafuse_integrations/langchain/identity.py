"""What tells ensembles apart, for LangChain's caches and traces."""

from __future__ import annotations

import hashlib
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

from adafuse_engine import Engine, MemberConfig

__all__ = ["identities"]

_ANONYMOUS: weakref.WeakKeyDictionary[Engine, str] = weakref.WeakKeyDictionary()


def identities(members: Sequence[MemberConfig], engine: Engine | None) -> list[dict[str, Any]]:
    """A description per member, for caches that may outlive this process; nothing secret in it."""
    if members or engine is None:
        return [
            {
                "model": member.model,
                "weight": member.weight,
                # In place of all the rest, some of which may be secret or long.
                "digest": hashlib.sha256(repr(member).encode()).hexdigest()[:16],
            }
            for member in members
        ]
    # Ready-made members have no description that says what they would write: equal only to themselves.
    token = _ANONYMOUS.setdefault(engine, uuid.uuid4().hex)
    return [
        {"model": name, "weight": weight, "digest": token}
        for name, weight in zip(engine.member_names, engine.weights, strict=True)
    ]
