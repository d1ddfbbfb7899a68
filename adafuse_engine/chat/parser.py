"""Reading an answer while it is written: text comes out as text, calls of tools as calls, piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from adafuse_engine.chat.forms import ToolForm
from adafuse_engine.chat.scanner import CallScanner
from adafuse_engine.types import InvalidToolCall, Tool, ToolCall

__all__ = ["CallDelta", "CallEnd", "CallStart", "Event", "TextDelta", "ToolCallParser", "parse"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call has begun, and its name is known."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call's arguments; all of them joined are its JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is over. One that never got a name had no `CallStart`."""

    index: int
    call: ToolCall | InvalidToolCall


Event: TypeAlias = TextDelta | CallStart | CallDelta | CallEnd


class ToolCallParser:
    """Takes an answer apart, in pieces of any size. No text makes it raise.

    Parameters
    ----------
    form
        How calls are written.
    tools
        If given, a call of any other tool is an invalid one.
    ids
        Makes the ids of calls; by default they are random.

    What only surrounds calls (marks, white space, a code fence) is no text. A call without its closing mark
    counts. What cannot be read becomes an `InvalidToolCall` that says why.
    """

    def __init__(
        self, form: ToolForm, tools: Collection[Tool] | None = None, ids: Callable[[], str] | None = None
    ) -> None:
        self._form = form
        self._known = None if tools is None else {tool.name for tool in tools}
        self._ids = ids or (lambda: f"call_{uuid.uuid4().hex[:24]}")
        self._events: list[Event] = []
        self._state = self._text if form.open else self._unmarked
        self._held = ""  # what may become a mark, or what stands before and behind JSON
        self._space = ""  # white space of which the next character decides whether it is text
        self._wrote = False
        self._calls = 0
        self._id = ""
        self._listed = False
        self._scanner = CallScanner()

    def feed(self, text: str) -> list[Event]:
        """What a further piece of the answer brings."""
        for char in text:
            self._state(char)
        return self._taken()

    def close(self) -> list[Event]:
        """What is left when the answer is over."""
        while self._state == self._json:
            raw = self._scanner.raw
            at = raw.find(self._form.close) if self._form.close else -1
            if at >= 0:
                # A string that was never closed has swallowed the mark, and what came behind it.
                self._invalid(raw[:at], "its JSON is broken")
                self._state, self._held = self._text, ""
                for char in raw[at + len(self._form.close) :]:
                    self._state(char)
            elif not self._form.open and not self._scanner.name:
                self._write(raw)
                self._state = self._text
            else:
                self._invalid(raw, "the answer ended before its JSON did")
                self._state, self._held = self._after, ""
        if self._state == self._broken or (self._state == self._before and not (self._listed or self._calls)):
            self._invalid(self._held, "it holds no JSON object")
        elif self._state in (self._text, self._unmarked):
            for char in self._held:
                self._release(char)
            if not self._calls and self._space:
                self._emit_text(self._space)
        self._held = self._space = ""
        self._state = self._text
        return self._taken()

    # ---- states: what the next character means

    def _text(self, char: str) -> None:
        self._held += char
        mark = self._form.open
        if not mark:
            self._release(char)
            self._held = ""
            return
        while self._held and not mark.startswith(self._held):
            self._release(self._held[0])
            self._held = self._held[1:]
        if self._held == mark:
            self._space = self._held = ""
            self._listed = False
            self._state = self._before

    def _unmarked(self, char: str) -> None:
        """Without marks: a brace at the beginning of the answer, or behind a call, begins a call."""
        if char == "{":
            self._space = ""
            self._begin()
        elif char.isspace() or (self._calls and char in ";,"):
            self._space += char
        else:
            self._state = self._text
            self._release(char)

    def _before(self, char: str) -> None:
        """Behind an opening mark, or between the calls of a list."""
        if char == "{":
            self._begin()
        elif char == "[" and self._form.listed and not self._held.strip():
            self._listed = True
        elif char == "]" and self._listed:
            self._end_marked()
        elif not (char == "," and self._listed):
            self._held += char
            if not "```json".startswith(self._held.strip()):
                self._state = self._broken

    def _json(self, char: str) -> None:
        scanner = self._scanner
        piece = scanner.feed(char)
        if scanner.name is not None and not self._id:
            self._id = self._ids()
            self._events.append(CallStart(self._calls, self._id, scanner.name))
            piece = scanner.streamed
        if piece and self._id:
            self._delta(piece)
        if scanner.done:
            self._end_call()

    def _after(self, char: str) -> None:
        """Behind a call's JSON: its closing mark, if it comes."""
        self._held += char
        found = self._held.lstrip(" \n\r\t`")
        if found == self._form.close:
            self._held = ""
            self._state = self._text
        elif not self._form.close.startswith(found):
            held, self._held = self._held, ""
            self._state = self._text
            for char_ in held:
                self._state(char_)

    def _broken(self, char: str) -> None:
        """Behind an opening mark with no JSON: all up to the closing mark is lost."""
        self._held += char
        close = self._form.close
        if close and self._held.endswith(close):
            self._invalid(self._held.removesuffix(close), "it holds no JSON object")
            self._held = ""
            self._state = self._text

    # ---- steps

    def _begin(self) -> None:
        self._held = ""
        self._id = ""
        self._scanner = CallScanner()
        self._state = self._json
        self._json("{")

    def _end_call(self) -> None:
        scanner = self._scanner
        call, rest = scanner.result(self._known)
        if isinstance(call, str) and not self._form.open and scanner.name is None:
            self._state = self._text  # an answer in JSON that is no call
            self._write(scanner.raw)
            return
        if isinstance(call, str):
            self._invalid(scanner.raw, call)
        else:
            if rest:
                self._delta(rest)
            self._events.append(CallEnd(self._calls, ToolCall(self._id, *call)))
            self._calls += 1
        if self._listed:
            self._state = self._before
        elif self._form.open:
            self._end_marked()
        else:
            self._state = self._unmarked

    def _end_marked(self) -> None:
        self._held = ""
        self._state = self._after if self._form.close else self._text

    def _invalid(self, raw: str, error: str) -> None:
        scanner = self._scanner if self._state == self._json else CallScanner()
        arguments = scanner.streamed or raw.strip()
        id_ = self._id if self._state == self._json and self._id else self._ids()
        self._events.append(CallEnd(self._calls, InvalidToolCall(id_, scanner.name, arguments, error)))
        self._calls += 1

    def _release(self, char: str) -> None:
        """A character of the text. White space waits: before a call it is none, nor behind one that ends all."""
        if char.isspace():
            self._space += char
            return
        if self._wrote or not self._calls:
            self._emit_text(self._space)
        self._space = ""
        self._wrote = True
        self._emit_text(char)

    def _write(self, text: str) -> None:
        for char in text:
            self._release(char)

    def _emit_text(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, TextDelta):
            self._events[-1] = TextDelta(last.text + text)
        elif text:
            self._events.append(TextDelta(text))

    def _delta(self, arguments: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, CallDelta) and last.index == self._calls:
            self._events[-1] = CallDelta(self._calls, last.arguments + arguments)
        else:
            self._events.append(CallDelta(self._calls, arguments))

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def parse(
    text: str, form: ToolForm, tools: Collection[Tool] | None = None, ids: Callable[[], str] | None = None
) -> tuple[str, list[ToolCall | InvalidToolCall]]:
    """A whole answer: its text, and its calls in order."""
    parser = ToolCallParser(form, tools, ids)
    events: Iterable[Any] = [*parser.feed(text), *parser.close()]
    events = list(events)
    return (
        "".join(e.text for e in events if isinstance(e, TextDelta)),
        [e.call for e in events if isinstance(e, CallEnd)],
    )
