"""SGLang's ``/generate``: log-probabilities of the prompt's last tokens and of what is written, in one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adafuse_engine.errors import MemberError
from adafuse_engine.loop import together
from adafuse_engine.members.remote.connection import Connection
from adafuse_engine.members.remote.dialect import Facts, Look, Sight, bad_answer

__all__ = ["SglangDialect"]


class SglangDialect:
    """The model of an SGLang server."""

    name = "sglang"
    most_top = 20
    asks_freely = True
    tolerance = 0.1

    def __init__(self, member: str, connection: Connection, model: str | None) -> None:
        self._member = member
        self._connection = connection
        self._model = model

    async def facts(self) -> Facts:
        """From ``/get_model_info``."""
        info = await self._connection.get("/get_model_info")
        if not isinstance(info, dict) or "model_path" not in info:
            raise MemberError(f"member {self._member!r}: the server is no SGLang server")
        length = info.get("context_length") or info.get("max_context_len")
        source = info.get("tokenizer_path") or info["model_path"]
        return Facts(self._model or info["model_path"], source, length)

    async def tokenize(self, text: str) -> list[int] | None:
        """It has no endpoint for that that all versions share."""
        return None

    async def look(self, looks: Sequence[Look], top: int) -> list[Sight]:
        """One request for what follows, one for what was asked, side by side."""
        sights = [Sight() for _ in looks]
        following = [i for i, look in enumerate(looks) if look.ahead]
        asking = [(i, token) for i, look in enumerate(looks) for token in look.ask]
        questions = [self._follow(looks, sights, following, top)] if following else []
        await together([*questions, self._asked(looks, sights, asking)] if asking else questions)
        return sights

    async def _follow(self, looks: Sequence[Look], sights: list[Sight], which: list[int], top: int) -> None:
        prompts = [looks[i].ids for i in which]
        told = await self._generate(
            prompts,
            max(looks[i].ahead for i in which),
            top_logprobs_num=top,
            # What is cached is used up to here; nothing before it is asked about.
            logprob_start_len=[len(ids) - 1 for ids in prompts],
        )
        for i, meta in zip(which, told, strict=True):
            rows = meta.get("output_top_logprobs")
            if not rows or not rows[0]:
                bad_answer(self._member, "output_top_logprobs", meta)
            sights[i].tops = [{int(t): float(lp) for lp, t, *_ in row} for row in rows if row]
            written = meta.get("output_token_logprobs") or ()
            sights[i].tokens = [int(t) for _, t, *_ in written][: len(sights[i].tops)]

    async def _asked(self, looks: Sequence[Look], sights: list[Sight], asking: list[tuple[int, int]]) -> None:
        prompts = [(*looks[i].ids, token) for i, token in asking]
        # The first entry is always null, hence one token earlier; never 0, which reads everything again.
        starts = [max(1, len(looks[i].ids) - 1) for i, _ in asking]
        told = await self._generate(prompts, 0, logprob_start_len=starts)
        for (i, token), meta in zip(asking, told, strict=True):
            rows = meta.get("input_token_logprobs") or ()
            last = rows[-1] if rows else None
            if last is None or last[0] is None or int(last[1]) != token:
                bad_answer(self._member, "log-probability of a token that was asked for", meta)
            sights[i].asked[token] = float(last[0])

    async def _generate(self, prompts: Sequence[Sequence[int]], tokens: int, **fields: Any) -> list[dict[str, Any]]:
        body = {
            "input_ids": [list(p) for p in prompts],
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
            "return_logprob": True,
            **fields,
        }
        answer = await self._connection.post("/generate", body)
        if not isinstance(answer, list) or len(answer) != len(prompts):
            bad_answer(self._member, f"{len(prompts)} results", answer)
        metas = [one.get("meta_info") for one in answer]
        if not all(isinstance(meta, dict) for meta in metas):
            bad_answer(self._member, "meta_info", answer)
        return metas
