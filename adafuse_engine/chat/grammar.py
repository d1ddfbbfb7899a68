"""Grammars for `DecodingConfig.grammar`: answers that are JSON of a schema, or calls of given tools."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from adafuse_engine.chat.forms import ToolForm
from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.types import Tool

__all__ = ["schema_grammar", "tools_grammar"]

log = logging.getLogger("adafuse_engine")

ANY_TEXT = r"(.|\n)*"

# One way to space JSON: what the schema leaves no choice in is then written without asking the members.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """An answer that is one JSON value of this schema.

    An object of listed properties has no others, unless ``additionalProperties`` says so. Raises
    `InvalidArgumentError` for a schema that cannot be followed.
    """
    return f"start: %json {_followed(_canonical(schema), 'the schema')}\n"


def tools_grammar(tools: Sequence[Tool], form: ToolForm, choice: str, *, parallel: bool = True) -> str | None:
    """An answer that may or must call tools, its calls written in ``form`` with arguments of the tool's schema.

    Parameters
    ----------
    choice
        ``auto``: text in which a call is well-formed once its opening mark is written. ``any``: calls and
        nothing else. A tool's name: one call of it. ``none``: text without an opening mark.
    parallel
        Whether an answer may hold several calls.

    Returns None for ``none`` and ``auto`` in a form without marks, where there is nothing to hold to. Raises
    `InvalidArgumentError` for a name that no tool has, and for a tool whose schema cannot be followed.
    """
    if not tools or (choice in ("auto", "none") and not form.open):
        return None
    if choice == "none":
        # Without its last character: weak models that may not write a mark write one with something added.
        mark = re.escape(form.open[:-1]).replace("/", r"\/")
        return f"start: TEXT\nTEXT: /{ANY_TEXT}/ & ~/{ANY_TEXT}{mark}{ANY_TEXT}/\n"
    if choice not in ("auto", "any"):
        tools = [tool for tool in tools if tool.name == choice]
        parallel = False
        if not tools:
            raise InvalidArgumentError(f"tool_choice: no tool is called {choice!r:.60}")
    calls = []
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{form.arguments}": '
        schema = _followed(_canonical(tool.parameters), f"tool {tool.name!r}")
        calls.append(f'call_{number}: {_literal(head)} %json {schema} "}}"')
    rules = [f"body: {' | '.join(f'call_{n}' for n in range(len(calls)))}", *calls]
    several = parallel and bool(form.open)
    more = f"({_literal(', ')} body)*" if several else ""
    inner = f'"[" body {more} "]"' if form.listed else "body"
    after = f"{_literal(form.pad)} {inner} {_literal(form.pad + form.close)}"
    if choice == "auto":
        # A lazy rule ends with the first mark that it comes to.
        rules += [f"TEXT: /{ANY_TEXT}/", f"opened[lazy]: TEXT {_literal(form.open)}", f"call: opened {after}"]
        start = "call* TEXT" if parallel and not form.listed else "call | TEXT"
    else:
        rules.append(f"call: {_literal(form.open)} {after}")
        start = f"call ({_literal(chr(10))} call)*" if several and not form.listed else "call"
    return "\n".join([f"start: {start}", *rules, ""])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _canonical(schema: Mapping[str, Any]) -> str:
    """The schema as text: closed, and without an outer object that allows anything."""
    whole = dict(schema) or {"type": "object", "properties": {}}
    return json.dumps({**_closed(whole), "x-guidance": _COMPACT}, ensure_ascii=False)


def _closed(schema: Any) -> Any:
    """With ``additionalProperties`` false where an object lists its properties and does not say otherwise."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, Mapping):
            closed[key] = {name: _closed(inner) for name, inner in value.items()}
        elif key in ("enum", "const", "default", "examples", "allOf"):
            # Values, and parts of objects that only together list all properties.
            closed[key] = value
        else:
            closed[key] = _closed(value)
    if "properties" in closed and "allOf" not in closed:
        closed.setdefault("additionalProperties", False)
    return closed


@functools.lru_cache(maxsize=256)
def _followed(schema: str, whose: str) -> str:
    """The schema, if it can be followed; if only in part, so that the rest is ignored, with a warning."""
    from llguidance import LLMatcher

    fault = LLMatcher.validate_grammar(f"start: %json {schema}")
    if not fault or fault.startswith("WARNING"):
        return schema
    lenient = json.loads(schema)
    lenient["x-guidance"]["lenient"] = True
    text = json.dumps(lenient, ensure_ascii=False)
    if (worse := LLMatcher.validate_grammar(f"start: %json {text}")) and not worse.startswith("WARNING"):
        raise InvalidArgumentError(f"{whose}: its JSON schema cannot be followed: {' '.join(fault.split())[:300]}")
    log.warning("%s: a part of its JSON schema is not held to: %s", whose, " ".join(fault.split())[:300])
    return text
