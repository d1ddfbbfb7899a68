"""Members without weights, to test chains and agents against: `ScriptedMember`, and `tool_call` for its answers."""

from collections.abc import Mapping
from typing import Any

from adafuse_engine.chat.forms import tool_form
from adafuse_engine.members.scripted import ScriptedMember
from adafuse_engine.types import ToolCall

__all__ = ["ScriptedMember", "tool_call"]


def tool_call(name: str, arguments: Mapping[str, Any], form: str = "json_tags") -> str:
    """A call as a model writes it in its answer, in the tool form of that name.

    Raises `UnknownArgumentError` for an unknown form.
    """
    return tool_form(form).write([ToolCall("", name, arguments)])
