"""One request for an answer, from the client's fields to the document or the events it gets."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from adafuse_engine.chat.turn import make_turn, normal_choice, schema_of, tool_of
from adafuse_engine.engine import Engine
from adafuse_engine.messages import messages_of
from adafuse_engine.server.answers import Head, call_deltas, error_body, logprobs_of, message_of, usage_of
from adafuse_engine.server.schema import ChatRequest, CompletionRequest
from adafuse_engine.types import Chunk, Completion, Prompt

__all__ = ["Answer", "ChatAnswer", "TextAnswer"]

logger = logging.getLogger(__name__)
DONE = "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"


@dataclass
class Answer:
    """What the two kinds of answers have in common.

    ``completions``: what the engine has finished for it. ``status``: of an error after the stream had begun.
    """

    engine: Engine
    model: str
    request: CompletionRequest | ChatRequest
    completions: list[Completion] = field(default_factory=list)
    status: int = 0

    async def _written(self, prompt: Prompt, options: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self.engine.astream(prompt, **options)) as chunks:
            async for chunk in chunks:
                if chunk.completion is not None:
                    self.completions.append(chunk.completion)
                yield chunk

    async def _all(self, prompt: Prompt, options: dict[str, Any]) -> tuple[Completion, list[Chunk]]:
        async with aclosing(self._written(prompt, options)) as written:
            chunks = [chunk async for chunk in written]
        return self.completions[-1], chunks

    async def document(self) -> dict[str, Any]:
        """The whole answer."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events, ``[DONE]`` last; an error after the first ends it in its place."""
        return self._told(self._pieces())

    def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        raise NotImplementedError

    async def _told(self, pieces: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
        begun = False
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    begun = True
                    yield _event(piece)
            except Exception as error:
                if not begun:
                    raise
                self.status, body = error_body(error)
                if self.status >= 500:
                    logger.exception("a stream failed")
                yield _event(body)
                return
        yield DONE

    def _extras(self, chunk: Chunk) -> dict[str, Any]:
        """Ours, where ``trace`` is asked for: how the piece came about, and with the last one the whole trace."""
        if not self.request.trace:
            return {}
        shown: dict[str, Any] = {"round": chunk.round, "confidence": chunk.confidence, "fused": chunk.fused}
        if chunk.completion is not None:
            shown["trace"] = chunk.completion.trace.to_dict()
            shown["usage"] = chunk.completion.usage.to_dict()
        elif chunk.record is not None:
            shown["record"] = chunk.record.to_dict()
        return {"adafuse": shown}

    def _traces(self) -> dict[str, Any]:
        return {"adafuse": [c.to_dict() for c in self.completions]} if self.request.trace else {}


class TextAnswer(Answer):
    """Of ``/v1/completions``: each prompt is a choice, one after the other."""

    def __init__(self, engine: Engine, model: str, request: CompletionRequest) -> None:
        super().__init__(engine, model, request)
        self._head = Head("text_completion", model)
        self._prompts = request.prompts()
        self._options = request.options()
        self._top = request.alternatives
        engine.check_options(**self._options)

    async def document(self) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for index, prompt in enumerate(self._prompts):
            completion, chunks = await self._all(prompt, self._options)
            told = None if self._top is None else logprobs_of(chunks, self._top, "text_completion")
            choices.append(
                {
                    "index": index,
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "logprobs": told,
                }
            )
        return self._head.whole(choices, usage_of(c.usage for c in self.completions), **self._traces())

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        for index, prompt in enumerate(self._prompts):
            async with aclosing(self._written(prompt, self._options)) as chunks:
                async for chunk in chunks:
                    reason = chunk.completion.finish_reason if chunk.completion else None
                    told = None if self._top is None else logprobs_of([chunk], self._top, "text_completion")
                    choice = {"index": index, "text": chunk.text, "finish_reason": reason, "logprobs": told}
                    yield self._head.piece([choice], **self._extras(chunk))
        if self.request.wants_usage:
            yield self._head.piece([], usage=usage_of(c.usage for c in self.completions))


class ChatAnswer(Answer):
    """Of ``/v1/chat/completions``."""

    def __init__(self, engine: Engine, model: str, request: ChatRequest, tool_form: str) -> None:
        super().__init__(engine, model, request)
        self._head = Head("chat.completion", model)
        self._top = request.alternatives
        tools = [tool_of(tool) for tool in request.tools or ()]
        choice = "none" if not tools and request.tool_choice == "none" else request.tool_choice
        self._turn = make_turn(
            messages_of(request.messages),
            engine.check_options(**request.options()),
            tools=tools,
            choice=normal_choice(choice, tools),
            form=tool_form,
            parallel=request.parallel_tool_calls is not False,
            schema=schema_of(request.response_format),
        )
        self._options = self._turn.settings.model_dump()

    async def document(self) -> dict[str, Any]:
        """The whole answer."""
        completion, chunks = await self._all(self._turn.prompt, self._options)
        text, calls = self._turn.read(completion.text)
        choice = {
            "index": 0,
            "message": message_of(text, calls),
            "finish_reason": "tool_calls" if calls else completion.finish_reason,
            "logprobs": None if self._top is None else logprobs_of(chunks, self._top, "chat.completion"),
        }
        return self._head.whole([choice], usage_of([completion.usage]), **self._traces())

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        parser, started = self._turn.parser(), set[int]()
        first = True
        async with aclosing(self._written(self._turn.prompt, self._options)) as chunks:
            async for chunk in chunks:
                deltas: list[dict[str, Any]] = []
                if parser is not None:
                    events = parser.feed(chunk.text) + (parser.close() if chunk.completion else [])
                    deltas = call_deltas(events, started)
                elif chunk.text:
                    deltas = [{"content": chunk.text}]
                if first:
                    deltas.insert(0, {"role": "assistant", "content": ""})
                    first = False
                for delta in deltas:
                    yield self._piece(delta, None, None, {})
                # Beside the deltas, for a call may hold back pieces that its text has already told of.
                if chunk.text and (self._top is not None or self.request.trace):
                    yield self._piece({}, None, chunk, {} if chunk.completion else self._extras(chunk))
                if chunk.completion is not None:
                    reason = "tool_calls" if started else chunk.completion.finish_reason
                    yield self._piece({}, reason, None, self._extras(chunk))
        if self.request.wants_usage:
            yield self._head.piece([], usage=usage_of(c.usage for c in self.completions))

    def _piece(
        self, delta: dict[str, Any], reason: str | None, chunk: Chunk | None, extras: dict[str, Any]
    ) -> dict[str, Any]:
        told = None
        if chunk is not None and self._top is not None:
            told = logprobs_of([chunk], self._top, "chat.completion")
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": told}
        return self._head.piece([choice], **extras)
