"""Chats with tools: forms that calls are written in, a parser that reads them back, grammars that hold to them."""

from adafuse_engine.chat.forms import TOOL_FORMS, ToolForm, tool_form
from adafuse_engine.chat.grammar import schema_grammar, tools_grammar
from adafuse_engine.chat.parser import (
    CallDelta,
    CallEnd,
    CallStart,
    Event,
    TextDelta,
    ToolCallParser,
    parse,
)
from adafuse_engine.chat.scanner import partial_object

__all__ = [
    "TOOL_FORMS",
    "CallDelta",
    "CallEnd",
    "CallStart",
    "Event",
    "TextDelta",
    "ToolCallParser",
    "ToolForm",
    "parse",
    "partial_object",
    "schema_grammar",
    "tool_form",
    "tools_grammar",
]
