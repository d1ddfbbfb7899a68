"""A turn of a chat: messages and tools -> what the engine is asked; what it writes -> text and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from adafuse_engine.chat.forms import tool_form
from adafuse_engine.chat.grammar import schema_grammar, tools_grammar
from adafuse_engine.chat.parser import CallEnd, Event, TextDelta, ToolCallParser
from adafuse_engine.config import DecodingConfig
from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.types import Chat, InvalidToolCall, Message, Tool, ToolCall

__all__ = ["Turn", "make_turn", "normal_choice", "schema_of", "text_of", "tool_of"]

_ANSWER = "Answer with one JSON value that follows this JSON schema, and with nothing else:\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """What the engine is asked, and the tool form of what it writes; None where that is text alone."""

    prompt: Chat
    settings: DecodingConfig
    form: str | None

    def parser(self) -> ToolCallParser | None:
        """A new parser for this turn's answer; None where it is text alone."""
        return ToolCallParser(tool_form(self.form)) if self.form else None

    def read(self, text: str) -> tuple[str, list[ToolCall | InvalidToolCall]]:
        """A whole answer as its text and its calls."""
        parser = self.parser()
        if parser is None:
            return text, []
        events = [*parser.feed(text), *parser.close()]
        return text_of(events), [e.call for e in events if isinstance(e, CallEnd)]


def make_turn(
    messages: Sequence[Message],
    settings: DecodingConfig,
    *,
    tools: Sequence[Tool] = (),
    choice: str = "auto",
    form: str = "json_tags",
    parallel: bool = True,
    schema: Mapping[str, Any] | None = None,
) -> Turn:
    """The turn for these messages.

    Parameters
    ----------
    tools, choice, parallel
        What may be called; ``auto`` (may), ``any`` (must), ``none`` or a tool's name (must, and that one); and
        whether there may be several calls. The calls follow the tools' schemas, whatever the members think.
    form
        How calls are written; see `adafuse_engine.chat`.
    schema
        A JSON schema that the answer follows; then no tools can be called.

    Raises `InvalidArgumentError` for a choice that no tool has, for a schema that cannot be followed, and for
    tools together with a schema.
    """
    if schema is not None:
        if tools and choice != "none":
            raise InvalidArgumentError("give either tools or a response format, not both; or tool_choice='none'")
        told = Message("system", _ANSWER + json.dumps(dict(schema), ensure_ascii=False))
        prompt = Chat(
            [told, *messages] if messages[:1] and messages[0].role != "system" else _after(messages, told)
        )
        return Turn(prompt, _held(settings, schema_grammar(schema)), None)
    if not tools:
        return Turn(Chat(list(messages)), settings, None)
    grammar = tools_grammar(tools, tool_form(form), choice, parallel=parallel)
    if grammar is not None:
        free = choice in ("auto", "none")
        settings = settings.override(grammar=grammar) if free else _held(settings, grammar)
    if choice == "none":
        # Nobody is told of tools, and a call that the history teaches is not written.
        return Turn(Chat(list(messages), (), form), settings, None)
    return Turn(Chat(list(messages), list(tools), form), settings, form)


def _after(messages: Sequence[Message], told: Message) -> list[Message]:
    """With the instruction behind the system text, which stays the first thing that members read."""
    return [*messages[:1], told, *messages[1:]]


def _held(settings: DecodingConfig, grammar: str) -> DecodingConfig:
    """Settings for an answer that is all grammar: a stop string would only cut it to pieces."""
    return settings.override(grammar=grammar, stop=())


def normal_choice(choice: Any, tools: Sequence[Tool]) -> str:
    """``tool_choice`` in any of its usual spellings -> ``auto``, ``any``, ``none`` or a tool's name.

    Raises `InvalidArgumentError` for anything else, and for a name that no tool has.
    """
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
        if choice is None:
            raise InvalidArgumentError(
                "tool_choice: a dict names a tool: {'type': 'function', 'function': {'name': ...}}"
            )
    if choice is None or choice is False or choice == "auto":
        return "auto"
    if choice is True or choice in ("any", "required"):
        if not tools:
            raise InvalidArgumentError(f"tool_choice={choice!r}, but no tools are given")
        return "any"
    if choice == "none" or choice in [tool.name for tool in tools]:
        return str(choice)
    known = ", ".join(repr(tool.name) for tool in tools) or "none are given"
    raise InvalidArgumentError(f"tool_choice: no tool is called {choice!r:.60}; tools: {known}")


def tool_of(schema: Mapping[str, Any]) -> Tool:
    """A `Tool` from its OpenAI form, ``{"type": "function", "function": {...}}`` or the inner part of it."""
    function = schema.get("function", schema)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(f"tools: {schema!r:.80} is no tool in OpenAI's form")
    return Tool(function["name"], function.get("description") or "", function.get("parameters") or {})


def schema_of(format_: Any) -> dict[str, Any] | None:
    """The JSON schema of a ``response_format`` in OpenAI's form, or None for text.

    Also takes a pydantic class. Raises `InvalidArgumentError` for anything else.
    """
    if isinstance(format_, type) and issubclass(format_, BaseModel):
        return format_.model_json_schema()
    kind = format_.get("type") if isinstance(format_, Mapping) else None
    if format_ is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object", "additionalProperties": True}
    if kind == "json_schema":
        inner = format_.get("json_schema", format_)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(schema, Mapping):
            return dict(schema)
    raise InvalidArgumentError(
        "response_format: {'type': 'json_schema', 'json_schema': {'schema': {...}}}, {'type': 'json_object'}, or "
        f"a pydantic class (got {format_!r:.80})"
    )


def text_of(events: Iterable[Event]) -> str:
    """The text among the events."""
    return "".join(e.text for e in events if isinstance(e, TextDelta))
