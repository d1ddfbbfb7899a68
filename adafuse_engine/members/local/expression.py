"""What a template cannot render, said by what it can: tools, calls, results and system texts as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from adafuse_engine.chat.forms import ToolForm
from adafuse_engine.members.local.templates import Abilities
from adafuse_engine.types import Message, Tool

__all__ = ["express", "ways"]


def ways(messages: Sequence[Message], can: Abilities) -> Iterator[Abilities]:
    """The abilities to count on for these messages, the gentlest first; the next if the template refuses.

    Trying shows what a template can do in general; a single history may still offend it.
    """
    if any(
        (message.content.strip() and message.tool_calls and not can.calls_with_text)
        or (len(message.tool_calls) > 1 and not can.parallel_calls)
        for message in messages
    ):
        can = replace(can, calls=False)
    yield can
    if can.calls or not can.alternates:
        can = replace(can, calls=False, alternates=True)
        yield can
    if can.tools or can.systems:
        can = replace(can, tools=False, systems=False)
        yield can
    if can.system:
        yield replace(can, system=False)


def express(messages: Sequence[Message], tools: Sequence[Tool], form: ToolForm, can: Abilities) -> list[Message]:
    """The same chat in messages that a template of these abilities renders whole.

    Schemas go into the system text, calls into their message's content, results into user messages, all as the
    tool form writes them; the system text into the first user message; neighbours of one role into one.
    """
    told = list(messages) if can.calls else _calls_as_text(messages, form)
    told = _systems(told, _instructions(tools, form, can), can)
    return _alternating(told) if can.alternates else told


def _instructions(tools: Sequence[Tool], form: ToolForm, can: Abilities) -> str:
    """What the system text has to tell of the tools: nothing, how to call them, or all of it."""
    if not tools:
        return ""
    if not can.tools:
        return form.instructions(tools)
    # A template that writes calls its own way teaches that way, but all members must write one.
    same = form.open in can.spelled and f'"{form.arguments}"' in can.spelled
    return "" if same else form.instructions(())


def _calls_as_text(messages: Sequence[Message], form: ToolForm) -> list[Message]:
    told: list[Message] = []
    after_result = False
    for message in messages:
        if message.role == "tool":
            text = form.write_result(message)
            if after_result:
                # The results of one turn are one turn.
                told[-1] = replace(told[-1], content=f"{told[-1].content}\n{text}")
            else:
                told.append(Message("user", text))
        elif message.tool_calls:
            text = _joined("\n", message.content, form.write(message.tool_calls))
            told.append(replace(message, content=text, tool_calls=()))
        else:
            told.append(message)
        after_result = message.role == "tool"
    return told


def _systems(messages: list[Message], more: str, can: Abilities) -> list[Message]:
    """With ``more`` in the first system text, and that where the template renders it."""
    if can.systems:
        if not more:
            return messages
        if messages and messages[0].role == "system":
            first = replace(messages[0], content=_joined("\n\n", messages[0].content, more))
            return [first, *messages[1:]]
        return [Message("system", more), *messages]
    text = _joined("\n\n", *(m.content for m in messages if m.role == "system"), more)
    rest = [m for m in messages if m.role != "system"]
    if not text:
        return rest
    # Where turns are strict, a system text may come out with the user's only.
    if can.system and (rest or not can.alternates):
        return [Message("system", text), *rest]
    if rest and rest[0].role == "user":
        return [replace(rest[0], content=_joined("\n\n", text, rest[0].content)), *rest[1:]]
    return [Message("user", text), *rest]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Begun by a user, neighbours of one role merged. Calls that the template renders stay on their own."""
    told: list[Message] = []
    for message in messages:
        if not [m for m in told if m.role != "system"] and message.role not in ("system", "user"):
            told.append(Message("user", ""))
        last = told[-1] if told else None
        if (
            last is not None
            and last.role == message.role != "tool"
            and not last.tool_calls
            and not message.tool_calls
        ):
            told[-1] = replace(last, content=_joined("\n\n", last.content, message.content))
        else:
            told.append(message)
    return told


def _joined(separator: str, *texts: str) -> str:
    return separator.join(text for text in texts if text)
