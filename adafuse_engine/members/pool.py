"""MemberConfig -> Member. Members that name the same model share one copy of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from adafuse_engine.config import EngineConfig, MemberConfig
from adafuse_engine.members.base import Member

__all__ = ["load_members"]


def load_members(config: EngineConfig) -> Sequence[Member]:
    """Load all members of an ensemble, in order.

    Raises `LoadError`; what was loaded before the failure is freed.
    """
    local = [m for m in config.members if _road(m) == "local"]
    made: dict[str, Member] = {}
    try:
        # Servers and actors first: to find one missing costs nothing yet.
        made = _all_elsewhere([m for m in config.members if m not in local], config)
        if local:
            # torch is imported here and not before: scripted members do without it.
            from adafuse_engine.members.local.member import load_local

            loaded = load_local(config.model_copy(update={"members": tuple(local)}))
            made |= {m.label: one for m, one in zip(local, loaded, strict=True)}
    except BaseException:
        for one in made.values():
            one.close()
        raise
    return [made[m.label] for m in config.members]


def _road(member: MemberConfig) -> str:
    if member.is_remote:
        return "remote"
    if member.placement == "ray":
        return "ray"
    return "local" if member.backend == "transformers" else member.backend


def _all_elsewhere(members: Sequence[MemberConfig], config: EngineConfig) -> dict[str, Member]:
    """Side by side, for most of the time is spent waiting; all or none of them."""
    if not members:
        return {}
    with ThreadPoolExecutor(max_workers=len(members)) as threads:
        coming = {m.label: threads.submit(_elsewhere, _road(m), m, config) for m in members}
    errors = [error for one in coming.values() if (error := one.exception())]
    if errors:
        for one in coming.values():
            if one.exception() is None:
                one.result().close()
        raise errors[0]
    return {label: one.result() for label, one in coming.items()}


def _elsewhere(road: str, member: MemberConfig, config: EngineConfig) -> Member:
    if road == "remote":
        from adafuse_engine.members.remote.member import load_remote

        return load_remote(member, grammars=config.prepare_grammars)
    if road == "ray":
        from adafuse_engine.members.ray import load_ray

        return load_ray(member, config)
    from adafuse_engine.members.llamacpp import load_llamacpp

    return load_llamacpp(member, config)
