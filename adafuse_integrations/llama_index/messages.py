"""LlamaIndex messages -> the engine's, and what the engine wrote -> LlamaIndex messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from adafuse_engine import Message, PromptError
from adafuse_engine.chat import CallDelta, CallEnd, CallStart, Event, partial_object
from adafuse_engine.chat.turn import Turn, text_of
from adafuse_engine.types import InvalidToolCall, ToolCall

__all__ = ["Answer", "follows_react", "message_in"]

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def message_in(index: int, message: ChatMessage) -> Message:
    """A message as the engine takes it. Raises `PromptError` for content that is not text."""
    texts, calls = [], []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolCallBlock):
            calls.append(_call(block))
        elif not isinstance(block, ThinkingBlock | CachePoint):
            raise PromptError(
                f"message {index} ({message.role.value}) holds a {type(block).__name__}, but members read "
                "nothing but text: leave it out or put it into words"
            )
    return Message(
        _ROLES.get(message.role, message.role.value),
        "".join(texts),
        tuple(calls),
        tool_call_id=message.additional_kwargs.get("tool_call_id"),
        name=message.additional_kwargs.get("name"),
    )


def _call(block: ToolCallBlock) -> ToolCall:
    arguments: Any = block.tool_kwargs
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"unreadable": block.tool_kwargs}
    return ToolCall(block.tool_call_id or "", block.tool_name, arguments)


def follows_react(messages: Sequence[ChatMessage]) -> bool:
    """Whether a system message tells to think, act and wait for an observation, as LlamaIndex's ReAct does."""
    marks = ("Thought:", "Action:", "Action Input:", "Observation:")
    return any(
        all(mark in (message.content or "") for mark in marks)
        for message in messages
        if message.role == MessageRole.SYSTEM
    )


class Answer:
    """An answer on its way: each piece gives the response so far.

    Calls stand in `ToolCallBlock`s from when their name is known, with as much of their arguments as could be
    read; those that turn out to be broken keep their text in place of arguments, or go into the answer's text
    if they have no name.
    """

    def __init__(self, turn: Turn | None) -> None:
        self._parser = turn.parser() if turn is not None else None
        self._text = ""
        self._blocks: dict[int, ToolCallBlock] = {}
        self._arguments: dict[int, str] = {}

    def add(self, text: str, raw: dict[str, Any], *, last: bool = False, delta: bool = True) -> ChatResponse:
        """The response after a further piece of what was written."""
        new = text
        if self._parser is not None:
            events = self._parser.feed(text)
            if last:
                events = [*events, *self._parser.close()]
            for event in events:
                self._take(event)
            broken = (e.call for e in events if isinstance(e, CallEnd) and e.index not in self._blocks)
            new = text_of(events) + "".join(c.arguments for c in broken if isinstance(c, InvalidToolCall))
        self._text += new
        blocks: list[Any] = [TextBlock(text=self._text)] if self._text or not self._blocks else []
        # Nothing goes into additional_kwargs: LlamaIndex writes those into the next prompt.
        message = ChatMessage(
            role=MessageRole.ASSISTANT, blocks=[*blocks, *(b.model_copy() for b in self._blocks.values())]
        )
        return ChatResponse(message=message, raw=raw, delta=new if delta else None)

    def _take(self, event: Event) -> None:
        match event:
            case CallStart():
                self._blocks[event.index] = ToolCallBlock(
                    tool_call_id=event.id, tool_name=event.name, tool_kwargs={}
                )
            case CallDelta():
                text = self._arguments[event.index] = self._arguments.get(event.index, "") + event.arguments
                self._blocks[event.index].tool_kwargs = partial_object(text)
            case CallEnd() if event.index in self._blocks:
                arguments = event.call.arguments
                self._blocks[event.index].tool_kwargs = (
                    dict(arguments) if not isinstance(arguments, str) else arguments
                )
