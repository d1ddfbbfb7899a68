"""What clients are sent: OpenAI's answers, chunks and errors, made of the engine's."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from adafuse_engine.chat.parser import CallDelta, CallEnd, CallStart, Event, TextDelta
from adafuse_engine.errors import (
    AdaFuseError,
    ConfigError,
    ContextWindowError,
    EngineClosedError,
    PromptError,
    UnavailableError,
    UnknownArgumentError,
)
from adafuse_engine.types import Chunk, InvalidToolCall, ToolCall, Usage

__all__ = ["Head", "call_deltas", "error_body", "logprobs_of", "message_of", "usage_of"]

Kind = Literal["chat.completion", "text_completion"]


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer have in common."""

    kind: Kind
    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], **extra: Any) -> dict[str, Any]:
        """A whole answer."""
        return {**self._body(self.kind, choices), "usage": usage, **extra}

    def piece(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """A chunk of a stream."""
        name = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return {**self._body(name, choices), **extra}

    def _body(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}


def usage_of(usages: Iterable[Usage]) -> dict[str, Any]:
    """Tokens as OpenAI counts them, with the cost per member under ``adafuse``."""
    given = list(usages)
    prompt, completion = sum(u.prompt_tokens for u in given), sum(u.completion_tokens for u in given)
    reused = sum(u.members[0].prompt_tokens_reused for u in given if u.members)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused},
        "adafuse": [u.to_dict()["members"] for u in given] if len(given) > 1 else given[0].to_dict()["members"],
    }


def _finite(logprob: float) -> float:
    """A log-probability as JSON can hold it: OpenAI's servers write -9999 for what has none."""
    return max(logprob, -9999.0) if not math.isnan(logprob) else -9999.0


def _alternatives(chunk: Chunk) -> tuple[float, dict[str, float]]:
    """The log-probability of what the chunk's round wrote, and of its candidates by their text.

    It is the fused score by which the candidates were compared. A round that one member led has none: there it
    is the logarithm of the confidence it was written with; what a grammar forced is certain.
    """
    record = chunk.record
    if record is None or record.forced:
        return 0.0, {}
    scored = {c.text: _finite(min(0.0, c.score)) for c in record.candidates if c.score is not None}
    winner = record.candidates[record.winner]
    if winner.score is not None:
        return scored[winner.text], scored
    own = _finite(math.log(record.certainty) if record.certainty > 0 else -math.inf)
    return own, {winner.text: own}


def logprobs_of(chunks: Iterable[Chunk], top: int, kind: Kind) -> dict[str, Any]:
    """The ``logprobs`` of an answer or a chunk: one entry for each piece the engine wrote."""
    rows = [(c.text, *_alternatives(c)) for c in chunks if c.text]
    best = [sorted(others.items(), key=lambda item: -item[1])[:top] for _, _, others in rows]
    if kind == "chat.completion":
        content = [
            {**_entry(text, own), "top_logprobs": [_entry(t, v) for t, v in others]}
            for (text, own, _), others in zip(rows, best, strict=True)
        ]
        return {"content": content, "refusal": None}
    offsets, at = [], 0
    for text, _, _ in rows:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": [text for text, _, _ in rows],
        "token_logprobs": [own for _, own, _ in rows],
        "top_logprobs": [dict(others) for others in best],
        "text_offset": offsets,
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


# ---- chat


def _call(call: ToolCall | InvalidToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call, InvalidToolCall) else json.dumps(dict(call.arguments))
    return {"id": call.id, "type": "function", "function": {"name": call.name or "", "arguments": arguments}}


def message_of(text: str, calls: Iterable[ToolCall | InvalidToolCall]) -> dict[str, Any]:
    """An assistant's message."""
    made = [_call(call) for call in calls]
    message: dict[str, Any] = {"role": "assistant", "content": text or None if made else text, "refusal": None}
    if made:
        message["tool_calls"] = made
    return message


def call_deltas(events: Iterable[Event], started: set[int]) -> list[dict[str, Any]]:
    """The deltas of these events, in order; ``started`` collects the calls that have begun."""
    deltas: list[dict[str, Any]] = []
    for event in events:
        match event:
            case TextDelta():
                deltas.append({"content": event.text})
            case CallStart():
                started.add(event.index)
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.index, "id": event.id, "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            case CallDelta():
                call = {"index": event.index, "function": {"arguments": event.arguments}}
                deltas.append({"tool_calls": [call]})
            case CallEnd() if event.index not in started:
                # It never got a name: all that can be told of it is what was written.
                started.add(event.index)
                deltas.append({"tool_calls": [{"index": event.index, **_call(event.call)}]})
    return deltas


# ---- errors


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body for an error. Of errors that are not ours it tells nothing."""
    param: str | None = None
    code: str | None = None
    match error:
        case ContextWindowError():
            status, kind, code, param = 400, "invalid_request_error", "context_length_exceeded", "messages"
        case UnknownArgumentError():
            status, kind, param = 400, "invalid_request_error", error.name
        case ConfigError() | PromptError():
            status, kind = 400, "invalid_request_error"
        case UnavailableError() | EngineClosedError():
            status, kind, code = 503, "server_error", "unavailable"
        case AdaFuseError():
            status, kind = 500, "server_error"
        case _:
            return 500, told("the server failed; its log says why", "server_error")
    return status, told(str(error), kind, param, code)


def told(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
