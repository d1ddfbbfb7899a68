"""LangChain messages -> the engine's, and what the engine wrote -> LangChain messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import (
    ToolCallChunk,
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)

from adafuse_engine import InvalidArgumentError, PromptError, Usage
from adafuse_engine.chat.parser import CallDelta, CallEnd, CallStart, Event
from adafuse_engine.types import InvalidToolCall, Message, ToolCall

__all__ = ["call_chunks", "calls_of", "messages_in", "usage_of"]

# Blocks of an assistant's message that say again what its tool calls say, or what it thought by itself.
_SILENT = ("tool_use", "tool_call", "invalid_tool_call", "tool_call_chunk", "reasoning", "thinking")


def messages_in(messages: Sequence[BaseMessage]) -> list[Message]:
    """LangChain's messages as the engine takes them.

    Raises `PromptError` for content that is not text, `InvalidArgumentError` for an unknown kind of message.
    """
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: BaseMessage) -> Message:
    text = _text(number, message)
    match message:
        case SystemMessage():
            return Message("system", text, name=message.name)
        case HumanMessage():
            return Message("user", text, name=message.name)
        case AIMessage():
            return Message("assistant", text, tuple(_calls(message)), name=message.name)
        case ToolMessage():
            return Message("tool", text, tool_call_id=message.tool_call_id, name=message.name)
        case FunctionMessage():
            return Message("tool", text, name=message.name)
        case ChatMessage():
            return Message(message.role, text, name=message.name)
    raise InvalidArgumentError(f"message {number} is a {type(message).__name__}, which no chat template knows")


def _text(number: int, message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text":
            texts.append(str(block.get("text", "")))
        elif not (isinstance(message, AIMessage) and block.get("type") in _SILENT):
            raise PromptError(
                f"message {number} ({message.type}) holds a block of type {block.get('type')!r:.40}, but members "
                "read text only: leave it out or put it into words"
            )
    return "".join(texts)


def _calls(message: AIMessage) -> Iterable[ToolCall]:
    """Its calls, those that could not be read among them, for their results may follow."""
    for call in message.tool_calls:
        yield ToolCall(call["id"] or "", call["name"], call["args"])
    for broken in message.invalid_tool_calls:
        if broken["name"]:
            yield ToolCall(broken["id"] or "", broken["name"], {"unreadable": broken["args"] or ""})


def calls_of(calls: Iterable[ToolCall | InvalidToolCall]) -> dict[str, list[Any]]:
    """The calls as an `AIMessage` takes them: ``tool_calls`` and ``invalid_tool_calls``."""
    valid, invalid = [], []
    for call in calls:
        if isinstance(call, ToolCall):
            valid.append(tool_call(name=call.name, args=dict(call.arguments), id=call.id))
        else:
            invalid.append(invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=call.error))
    return {"tool_calls": valid, "invalid_tool_calls": invalid}


def call_chunks(events: Iterable[Event], started: set[int]) -> list[ToolCallChunk]:
    """The events' pieces of calls, one per call; ``started`` collects the calls that have begun."""
    # LangChain puts pieces together that come in different chunks, not in one.
    chunks: dict[int, ToolCallChunk] = {}
    for event in events:
        match event:
            case CallStart():
                started.add(event.index)
                chunks[event.index] = tool_call_chunk(name=event.name, args="", id=event.id, index=event.index)
            case CallDelta():
                chunk = chunks.setdefault(event.index, tool_call_chunk(args="", index=event.index))
                chunk["args"] = (chunk["args"] or "") + event.arguments
            case CallEnd() if event.index not in started:
                # It never got a name: all that can be told of it is what was written.
                call = event.call
                args = call.arguments if isinstance(call, InvalidToolCall) else json.dumps(dict(call.arguments))
                chunks[event.index] = tool_call_chunk(name=call.name, args=args, id=call.id, index=event.index)
    return list(chunks.values())


def usage_of(usage: Usage) -> UsageMetadata:
    """Tokens by the first member's count; ``cache_read``: those of the prompt that an earlier request had left."""
    reused = usage.members[0].prompt_tokens_reused if usage.members else 0
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=reused),
    )
