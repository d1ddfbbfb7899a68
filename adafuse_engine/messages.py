"""Chat messages in whatever shape they come -> `Message` values; a tool -> the schema that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from adafuse_engine.errors import EmptyPromptError, InvalidArgumentError, PromptError, check_text
from adafuse_engine.types import Chat, Message, Tool, ToolCall

__all__ = ["ROLES", "messages_of", "tool_schema"]

ROLES: Final = ("system", "user", "assistant", "tool")
"""The roles that members know. ``developer`` is another word for ``system``."""


def messages_of(prompt: Sequence[Message | Mapping[str, Any]] | Chat) -> list[Message]:
    """The messages of a prompt, each call with an id, each tool message with its call's id and name.

    A message is a `Message` or a dict in the OpenAI form: ``content`` a string, None or a list of text blocks;
    ``tool_calls`` with ``function: {name, arguments}``, the arguments a dict or a JSON string.

    Raises `InvalidArgumentError` for what is no message or has an unknown role, `EmptyPromptError` for none at
    all, `PromptError` for content that is not text and for arguments that are no JSON object.
    """
    given = prompt.messages if isinstance(prompt, Chat) else prompt
    messages: list[Message] = []
    for number, message in enumerate(given):
        messages.append(_message(message, number))
    if not messages:
        raise EmptyPromptError("the list of messages is empty; give at least one user message")
    return _matched(messages)


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates take it: ``{"type": "function", "function": {...}}``.

    Raises `InvalidArgumentError` for what is no `Tool`.
    """
    if not isinstance(tool, Tool):
        raise InvalidArgumentError(f"tools: a tool is a Tool, not {type(tool).__name__} {tool!r:.60}")
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _message(message: Message | Mapping[str, Any], number: int) -> Message:
    if isinstance(message, Message):
        fields: Mapping[str, Any] = {
            "role": message.role,
            "content": message.content,
            "tool_calls": message.tool_calls,
            "tool_call_id": message.tool_call_id,
            "name": message.name,
        }
    elif isinstance(message, Mapping) and "role" in message and ("content" in message or message.get("tool_calls")):
        fields = message
    else:
        raise InvalidArgumentError(
            f"prompt: a message is a dict with role and content, not {type(message).__name__} {message!r:.60}"
        )
    role = "system" if fields["role"] == "developer" else fields["role"]
    if role not in ROLES:
        raise InvalidArgumentError(
            f"prompt: message {number} has the role {role!r:.40}; give it one of {', '.join(ROLES)} or developer"
        )
    where = f"message {number} ({role})"
    calls = fields.get("tool_calls") or ()
    if calls and role != "assistant":
        raise InvalidArgumentError(f"prompt: {where} has tool_calls; only an assistant message calls tools")
    return Message(
        role,
        _text(fields.get("content"), where),
        tuple(_call(call, where) for call in calls),
        fields.get("tool_call_id"),
        fields.get("name"),
    )


def _text(content: Any, where: str) -> str:
    """A string, None, or text blocks, which belong together without anything between them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise PromptError(f"{where} holds a {type(content).__name__}; members read text only: give a string")
    texts = []
    for block in content:
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise PromptError(f"{where} holds a block of type {kind!r:.40}; members read text only: leave it out")
    return check_text("".join(texts), where)


def _call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(
            f"prompt: {where} has a tool call without a name; give "
            '{"id": ..., "function": {"name": ..., "arguments": ...}}'
        )
    name, arguments = function["name"], function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise PromptError(f"{where} calls {name!r} with arguments that are no JSON: {error}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise PromptError(f"{where} calls {name!r} with a {type(arguments).__name__}; arguments are a JSON object")
    return ToolCall(call.get("id") or "", name, arguments)


def _matched(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls all have ids, and whose results name their calls as far as they can be told."""
    taken = {c.id for m in messages for c in m.tool_calls} | {m.tool_call_id for m in messages}
    names: dict[str, str] = {}
    waiting: list[ToolCall] = []
    matched = []
    count = 0
    for message in messages:
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                if not call.id:
                    while f"call_{count}" in taken:
                        count += 1
                    call = replace(call, id=f"call_{count}")
                    count += 1
                calls.append(call)
                names[call.id] = call.name
            waiting = list(calls)
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool":
            known = message.tool_call_id
            if not known:
                # Without an id: the first call of that name that has no result yet.
                known = next((c.id for c in waiting if message.name in (None, c.name)), None)
            waiting = [c for c in waiting if c.id != known]
            message = replace(message, tool_call_id=known, name=message.name or names.get(known or ""))
        matched.append(message)
    return matched
