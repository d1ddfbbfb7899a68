"""Tool forms: how tools, calls and results are told in plain text, the same for all members of an ensemble."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adafuse_engine.errors import UnknownArgumentError
from adafuse_engine.types import Message, Tool, ToolCall

__all__ = ["TOOL_FORMS", "ToolForm", "tool_form"]


@dataclass(frozen=True, slots=True)
class ToolForm:
    """One way to write calls as JSON in a text.

    Parameters
    ----------
    name
        What it is chosen by.
    open, close
        The marks around a call, or around all calls of an answer if it is ``listed``. Without marks an answer
        that begins with a brace is a call.
    pad
        What stands between the marks and the JSON.
    listed
        All calls of an answer stand in one JSON list.
    arguments
        The key of a call's arguments; that of its name is ``name``.
    """

    name: str
    open: str
    close: str
    pad: str = ""
    listed: bool = False
    arguments: str = "arguments"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """System text that tells the tools' schemas and how to call one; without tools, the latter alone."""
        example = self._wrap(f'{{"name": "the tool\'s name", "{self.arguments}": {{"its": "arguments"}}}}')
        how = f"To call a tool, write nothing but this, as JSON with the tool's own name and arguments:\n{example}"
        if not tools:
            return how
        schemas = "\n".join(
            _json({"name": t.name, "description": t.description, "parameters": dict(t.parameters)}) for t in tools
        )
        told = "You can call these tools. Each line is one of them, with the JSON schema of its arguments."
        return f"{told}\n{schemas}\n{how}"

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as an answer writes them."""
        written = [_json({"name": c.name, self.arguments: dict(c.arguments)}) for c in calls]
        if self.listed:
            return self._wrap(", ".join(written))
        return "\n".join(map(self._wrap, written))

    def write_result(self, message: Message) -> str:
        """A tool's result as the text of a user message, for templates that know no tools.

        In plain words: members that were not trained on marks of a kind go on writing them.
        """
        of = f" {message.name}" if message.name else ""
        return f"The tool{of} says: {message.content}"

    def _wrap(self, call: str) -> str:
        inner = f"[{call}]" if self.listed else call
        return f"{self.open}{self.pad}{inner}{self.pad}{self.close}"


def _forms(*forms: ToolForm) -> dict[str, ToolForm]:
    return {form.name: form for form in forms}


TOOL_FORMS = _forms(
    # Of Qwen and of many models tuned after Hermes.
    ToolForm("json_tags", "<tool_call>", "</tool_call>", pad="\n"),
    # Of Mistral's models.
    ToolForm("mistral", "[TOOL_CALLS]", "", listed=True),
    # Of Llama 3.1 and later.
    ToolForm("llama3_json", "", "", arguments="parameters"),
)
"""The known forms by name. Choose the one that most members were trained on."""


def tool_form(name: str) -> ToolForm:
    """The form of that name. Raises `UnknownArgumentError` for an unknown one."""
    if name not in TOOL_FORMS:
        raise UnknownArgumentError(name, TOOL_FORMS, "tool_form")
    return TOOL_FORMS[name]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
