"""Tool forms: how tools, calls and results are told to a member in plain text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.types import Message, Tool, ToolCall

__all__ = ["ToolForm", "tool_form"]


class ToolForm(Protocol):
    """One way to spell tools in text."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """System text: the tools' schemas and how to call them."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as an answer spells them."""
        ...

    def write_result(self, message: Message) -> str:
        """A tool message as text of a user message."""
        ...


class _JsonTags:
    """A JSON object per call in ``<tool_call>`` tags; results in ``<tool_response>`` tags."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        lines = [
            _json({"name": t.name, "description": t.description, "parameters": dict(t.parameters)}) for t in tools
        ]
        return (
            "You may call these tools:\n"
            + "\n".join(lines)
            + '\nTo call one, write:\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
        )

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(
            f"<tool_call>\n{_json({'name': c.name, 'arguments': dict(c.arguments)})}\n</tool_call>" for c in calls
        )

    def write_result(self, message: Message) -> str:
        return f"<tool_response>\n{message.content}\n</tool_response>"


def tool_form(name: str) -> ToolForm:
    """The form of that name. Raises `InvalidArgumentError` for an unknown one."""
    if name != "json_tags":
        raise InvalidArgumentError(f"tool_form: no form {name!r}; known: json_tags")
    return _JsonTags()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
