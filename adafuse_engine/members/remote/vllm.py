"""vLLM's completions: lists of prompts as ids, and log-probabilities of asked tokens that keep the prefix cache.

``prompt_logprobs`` and ``echo`` would prefill every candidate again, so candidates are scored as a list of prefixes
with ``logprob_token_ids`` instead; where a server does not know that, ``prompt_logprobs`` is what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adafuse_engine.errors import MemberError
from adafuse_engine.loop import together
from adafuse_engine.members.remote.connection import Connection
from adafuse_engine.members.remote.dialect import Facts, Look, Sight, bad_answer

__all__ = ["VllmDialect"]

MOST_ASKED = 128
_PREFIX = "token_id:"


class VllmDialect:
    """One model of a vLLM server."""

    name = "vllm"
    most_top = 20
    asks_freely = True
    tolerance = 0.1

    def __init__(self, member: str, connection: Connection, model: str | None) -> None:
        self._member = member
        self._connection = connection
        self._model = model
        self._knows_asked = True

    async def facts(self) -> Facts:
        """From the list of models."""
        listed = await self._connection.get("/v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not models:
            bad_answer(self._member, "list of models", listed)
        names = [m.get("id") for m in models]
        if self._model is None:
            self._model = str(names[0])
        if self._model not in names:
            raise MemberError(
                f"member {self._member!r}: the server has no model {self._model!r}; "
                f"it has {', '.join(map(repr, names))}"
            )
        entry = models[names.index(self._model)]
        if "max_model_len" not in entry:
            raise MemberError(f"member {self._member!r}: the server is no vLLM server")
        return Facts(self._model, entry.get("root") or self._model, entry["max_model_len"])

    async def tokenize(self, text: str) -> list[int] | None:
        """By the server's own endpoint."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._connection.post("/tokenize", body)
        except MemberError:
            return None
        return answer.get("tokens") if isinstance(answer, dict) else None

    async def look(self, looks: Sequence[Look], top: int) -> list[Sight]:
        """One request for what follows, one for what was asked, side by side."""
        sights = [Sight() for _ in looks]
        following = [i for i, look in enumerate(looks) if look.ahead]
        asking = [i for i, look in enumerate(looks) if look.ask]
        questions = [self._follow(looks, sights, following, top)] if following else []
        await together([*questions, self._asked(looks, sights, asking)] if asking else questions)
        return sights

    async def _follow(self, looks: Sequence[Look], sights: list[Sight], which: list[int], top: int) -> None:
        ahead = max(looks[i].ahead for i in which)
        choices = await self._complete([looks[i].ids for i in which], max_tokens=ahead, logprobs=top)
        for i, choice in zip(which, choices, strict=True):
            told = choice.get("logprobs") or {}
            tops = told.get("top_logprobs")
            if not tops or tops[0] is None:
                bad_answer(self._member, "logprobs.top_logprobs", choice)
            sights[i].tops = [self._by_id(row) for row in tops if row]
            sights[i].tokens = [self._id(t) for t in told.get("tokens", ())][: len(sights[i].tops)]

    async def _asked(self, looks: Sequence[Look], sights: list[Sight], which: list[int]) -> None:
        wanted = sorted({t for i in which for t in looks[i].ask})
        for start in range(0, len(wanted), MOST_ASKED):
            some = wanted[start : start + MOST_ASKED]
            mine = [i for i in which if not set(some).isdisjoint(looks[i].ask)]
            if self._knows_asked:
                choices = await self._complete(
                    [looks[i].ids for i in mine], max_tokens=1, logprobs=1, logprob_token_ids=some
                )
                for i, choice in zip(mine, choices, strict=True):
                    rows = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
                    sights[i].asked |= self._by_id(rows[0] or {})
                missing = any(set(looks[i].ask) & set(some) - sights[i].asked.keys() for i in mine)
                # A server that ignores the field answers with other tokens.
                self._knows_asked = not missing
        lacking = [(i, t) for i in which for t in looks[i].ask if t not in sights[i].asked]
        if lacking:
            await self._by_prompt(looks, sights, lacking)

    async def _by_prompt(self, looks: Sequence[Look], sights: list[Sight], lacking: list[tuple[int, int]]) -> None:
        """Each token at the end of a prompt of its own: the server computes the whole prompt again."""
        prompts = [(*looks[i].ids, t) for i, t in lacking]
        choices = await self._complete(prompts, max_tokens=1, prompt_logprobs=0)
        for (i, token), choice in zip(lacking, choices, strict=True):
            rows = choice.get("prompt_logprobs") or [None]
            entry = (rows[-1] or {}).get(str(token))
            if not entry or len(rows) != len(looks[i].ids) + 1:
                bad_answer(self._member, "log-probability of a token that was asked for", choice)
            sights[i].asked[token] = float(entry["logprob"])

    async def _complete(self, prompts: Sequence[Sequence[int]], **fields: Any) -> list[dict[str, Any]]:
        body = {
            "model": self._model,
            "prompt": [list(p) for p in prompts],
            "temperature": 0,
            # A model's own generation config may set others.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_tokens_as_token_ids": True,
            **fields,
        }
        answer = await self._connection.post("/v1/completions", body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != len(prompts):
            bad_answer(self._member, f"{len(prompts)} choices", answer)
        choices = sorted(choices, key=lambda c: c.get("index", 0))
        if [c.get("index") for c in choices] != list(range(len(prompts))):
            bad_answer(self._member, "choice for every prompt", answer)
        return choices

    def _by_id(self, row: dict[str, float]) -> dict[int, float]:
        found = {self._id(t): float(lp) for t, lp in row.items()}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _id(self, token: str) -> int:
        if not token.startswith(_PREFIX):
            bad_answer(self._member, "token ids (return_tokens_as_token_ids)", token)
        return int(token.removeprefix(_PREFIX))
