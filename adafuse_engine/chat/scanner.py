"""A call's JSON object, character by character: its name and its arguments as soon as they can be told."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["CallScanner", "partial_object"]

_COMING = '"\ue000 still to come"'
_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Reads one JSON object from its brace on.

    ``raw``: what was read. ``done``: the object is whole. ``name``: the call's name once it is known.
    ``streamed``: the arguments' text so far, if they are an object.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.done = False
        self.name: str | None = None
        self.streamed = ""
        self._depth = 0
        self._string = False
        self._escaped = False
        self._began = 0
        self._key: str | None = None
        self._value: int | None = None  # where the value of a key of the outer object begins
        self._open = False
        self._other = ""  # arguments that are no object, as text

    def feed(self, char: str) -> str:
        """Read one character; the piece of the arguments that it is, if any."""
        self.raw += char
        if self._string:
            self._in_string(char)
        elif char == '"':
            self._string = True
            self._began = len(self.raw) - 1
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        if self._opens(char):
            self._open = True
        if self._open:
            self.streamed += char
            self._open = self._depth > 1 or self._string
            return char
        if self._depth <= 1 and not self._string:
            self._outside(char)
        return ""

    def result(self, known: Collection[str] | None) -> tuple[tuple[str, Mapping[str, Any]] | str, str]:
        """Name and arguments, or what is wrong; and the text of the arguments that was not streamed."""
        try:
            json.loads(self.raw, strict=False)
        except ValueError as error:
            return f"its JSON is broken: {error}", ""
        if not self.name:
            return 'it has no "name"', ""
        if known is not None and self.name not in known:
            return f"no tool is called {self.name!r:.60}; tools: {', '.join(map(repr, sorted(known)))}", ""
        if self.streamed:
            return (self.name, json.loads(self.streamed, strict=False)), ""
        text = self._other or "{}"
        try:
            arguments = json.loads(text, strict=False)
            if isinstance(arguments, str):
                # Some models write the JSON of the arguments as a string.
                text = arguments
                arguments = json.loads(text, strict=False)
        except ValueError as error:
            return f"its arguments are a string that holds no JSON: {error}", ""
        if arguments is None:
            text, arguments = "{}", {}
        if not isinstance(arguments, dict):
            return f"its arguments are no JSON object but {text:.60}", ""
        return (self.name, arguments), text

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._string = False
            if self._depth == 1:
                self._end_string()

    def _end_string(self) -> None:
        """A string of the outer object is whole: a key, or a value."""
        try:
            text = json.loads(self.raw[self._began :], strict=False)
        except ValueError:
            return
        if self._value is None:
            self._key = text
        elif self._key == "name" and self.name is None and isinstance(text, str) and text:
            self.name = text

    def _opens(self, char: str) -> bool:
        """Whether the arguments begin here, as an object. A second value under their key is left out."""
        if char != "{" or self._depth != 2 or self._string or self.streamed or self._other:
            return False
        return self._key in _ARGUMENTS and self._value is not None and not self.raw[self._value : -1].strip()

    def _outside(self, char: str) -> None:
        """A character of the outer object that stands in no string."""
        if char == ":" and self._key is not None and self._value is None:
            self._value = len(self.raw)
        elif char in ",}" and self._depth == (0 if char == "}" else 1) and self._value is not None:
            if self._key in _ARGUMENTS and not self.streamed and not self._other:
                self._other = self.raw[self._value : -1].strip()
            self._key = self._value = None


def partial_object(text: str) -> dict[str, Any]:
    """What can be told of a JSON object that is not whole yet; empty where nothing can.

    A string that is being written counts as far as it goes; a key whose value is still to come is left out.
    """
    closers, string, escaped = "", False, False
    for char in text:
        if string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            else:
                string = char != '"'
        elif char == '"':
            string = True
        elif char in "{[":
            closers = ("}" if char == "{" else "]") + closers
        elif char in "}]":
            closers = closers[1:]
    begun = (text[:-1] if escaped else text) + '"' * string
    for whole in (begun, begun.rstrip().removesuffix(","), f"{begun} {_COMING}", f"{begun}: {_COMING}"):
        try:
            found = json.loads(whole + closers, strict=False)
        except ValueError:
            continue
        return _known(found) if isinstance(found, dict) else {}
    return {}


def _known(value: Any) -> Any:
    """Without what is still to come."""
    if isinstance(value, dict):
        return {k: _known(v) for k, v in value.items() if v != json.loads(_COMING)}
    if isinstance(value, list):
        return [_known(v) for v in value if v != json.loads(_COMING)]
    return value
