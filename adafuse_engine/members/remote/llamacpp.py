"""llama.cpp's server: one place a request; the probability of a given token by making it the only choice.

It has no echo and ignores ``prompt_logprobs`` without a word. What it tells of a token that a bias forces is its
probability before the bias.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from adafuse_engine.errors import MemberError
from adafuse_engine.loop import together
from adafuse_engine.members.remote.connection import Connection
from adafuse_engine.members.remote.dialect import Facts, Look, Sight, bad_answer

__all__ = ["LlamaCppDialect"]

FORCE = 1000


class LlamaCppDialect:
    """The model of a llama.cpp server. Requests beyond its slots would wait there; they wait here instead."""

    name = "llamacpp"
    most_top = 128
    asks_freely = False
    tolerance = 0.5

    def __init__(self, member: str, connection: Connection, model: str | None) -> None:
        self._member = member
        self._connection = connection
        self._model = model
        self._count = 1
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def facts(self) -> Facts:
        """From ``/props``."""
        props = await self._connection.get("/props")
        if not isinstance(props, dict) or "default_generation_settings" not in props:
            raise MemberError(f"member {self._member!r}: the server is no llama.cpp server")
        self._count = int(props.get("total_slots") or 1)
        path = props.get("model_path")
        window = props["default_generation_settings"].get("n_ctx")
        return Facts(self._model or str(path), path, window)

    async def tokenize(self, text: str) -> list[int] | None:
        """By the server's own endpoint."""
        try:
            answer = await self._connection.post("/tokenize", {"content": text, "add_special": False})
        except MemberError:
            return None
        return answer.get("tokens") if isinstance(answer, dict) else None

    async def look(self, looks: Sequence[Look], top: int) -> list[Sight]:
        """A request for each place, and one for each token that is asked for."""
        sights = [Sight() for _ in looks]
        pairs = list(zip(looks, sights, strict=True))
        follow = [self._follow(look, sight, top) for look, sight in pairs if look.ahead]
        await together([*follow, *(self._asked(look, sight, t) for look, sight in pairs for t in look.ask)])
        return sights

    async def _follow(self, look: Look, sight: Sight, top: int) -> None:
        for entry in await self._complete(look.ids, n_predict=look.ahead, n_probs=top):
            sight.tokens.append(int(entry["id"]))
            sight.tops.append({int(t["id"]): float(t["logprob"]) for t in entry["top_logprobs"]})

    async def _asked(self, look: Look, sight: Sight, token: int) -> None:
        [entry, *_] = await self._complete(look.ids, n_predict=1, n_probs=1, logit_bias=[[token, FORCE]])
        if int(entry["id"]) != token:
            bad_answer(self._member, f"token {token}, which was forced", entry)
        sight.asked[token] = float(entry["logprob"])

    async def _complete(self, ids: Sequence[int], **fields: Any) -> list[dict[str, Any]]:
        body = {
            "prompt": list(ids),
            "temperature": 0,
            "repeat_penalty": 1.0,
            "cache_prompt": True,
            "post_sampling_probs": False,
            **fields,
        }
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._count))
        async with slots:
            answer = await self._connection.post("/completion", body)
        told = answer.get("completion_probabilities") if isinstance(answer, dict) else None
        if not told or not all("id" in entry and "top_logprobs" in entry for entry in told):
            bad_answer(self._member, "completion_probabilities", answer)
        return list(told)
