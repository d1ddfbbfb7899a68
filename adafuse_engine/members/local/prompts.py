"""A prompt -> a member's token ids: raw text as it is, chat messages through the member's own template."""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from adafuse_engine.chat.forms import tool_form
from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.members.local.expression import express, ways
from adafuse_engine.members.local.templates import abilities_of, render, template_of, wire
from adafuse_engine.messages import messages_of, tool_schema
from adafuse_engine.types import Chat, Prompt

__all__ = ["prompt_ids"]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, ends: frozenset[int], chat_template: str | None = None
) -> list[int]:
    """Token ids of a prompt, with one BOS where the tokenizer wants one and no end marker of its own.

    What messages and tools hold is text: a special token that is spelled in it stays that spelling. Raises
    `InvalidArgumentError` for messages that the template refuses, and what `messages_of` raises.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt).input_ids)
        # Some tokenizers close what they encode; the text goes on here.
        if ids and ids[-1] in ends and list(tokenizer("").input_ids)[-1:] == ids[-1:]:
            ids.pop()
        return _one_bos(tokenizer, ids)
    text, mark = _rendered(tokenizer, prompt if isinstance(prompt, Chat) else Chat(prompt), chat_template)
    bos = tokenizer.bos_token_id
    wants_bos = bos is not None and bos in list(tokenizer("").input_ids)
    if wants_bos and text.lstrip().startswith(tokenizer.bos_token):
        # Line breaks that a template leaves before its BOS would part it from the one added here.
        text = text.lstrip()
    ids = _encoded(tokenizer, text, mark)
    return _one_bos(tokenizer, [bos, *ids] if wants_bos else ids)


def _rendered(tokenizer: PreTrainedTokenizerBase, chat: Chat, chat_template: str | None) -> tuple[str, str]:
    """The chat as the template writes it, and the mark that cuts special tokens spelled in the chat."""
    messages = messages_of(chat)
    form = tool_form(chat.tool_form)
    schemas = [tool_schema(tool) for tool in chat.tools]
    template = template_of(tokenizer, chat_template, tools=bool(schemas))
    refusal: Exception | None = None
    for can in ways(messages, abilities_of(tokenizer, template, tools=bool(schemas))):
        told: Any = wire(express(messages, chat.tools, form, can), can)
        given: Any = schemas if schemas and can.tools else None
        mark = _unused(repr((told, given)))
        try:
            return render(tokenizer, template, *_cut(tokenizer, (told, given), mark)), mark
        except Exception as error:  # a template may raise anything
            refusal = refusal or error
    raise InvalidArgumentError(f"prompt: the chat template refuses these messages: {refusal}") from refusal


def _one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Without a second BOS, as a prompt that already spells one would get."""
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


# ---- Special tokens spelled in what the user gave


def _unused(text: str) -> str:
    """A character that the text has not, from a plane for private use."""
    return next(c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in text and repr(c)[1:-1] not in text)


class _Special:
    """A tokenizer's special tokens as text: some have thousands, so they are looked up, not tried in turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder.values()
        # One of a single character cannot be cut.
        self._spelled = frozenset(token.content for token in added if token.special and len(token.content) > 1)
        self._lengths = sorted({len(content) for content in self._spelled})
        firsts = sorted({content[0] for content in self._spelled})
        self._first = re.compile(f"[{''.join(map(re.escape, firsts))}]" if firsts else "(?!)")

    def cut(self, given: Any, mark: str) -> Any:
        """With the mark after the first character of every special token that a string spells."""
        if isinstance(given, str):
            return self._first.sub(lambda found: found[0] + mark * self._begins(given, found.start()), given)
        if isinstance(given, dict):
            return {self.cut(key, mark): self.cut(item, mark) for key, item in given.items()}
        if isinstance(given, list | tuple):
            return [self.cut(item, mark) for item in given]
        return given

    def _begins(self, text: str, place: int) -> bool:
        return any(text[place : place + length] in self._spelled for length in self._lengths)


_special: WeakKeyDictionary[PreTrainedTokenizerBase, _Special] = WeakKeyDictionary()


def _cut(tokenizer: PreTrainedTokenizerBase, given: Any, mark: str) -> Any:
    if tokenizer not in _special:
        _special[tokenizer] = _Special(tokenizer)
    return _special[tokenizer].cut(given, mark)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, mark: str) -> list[int]:
    """Ids of the text, its pieces between the marks each taken by itself. Without a mark: as it always was."""
    first, *others = text.split(mark)
    ids = list(tokenizer(first, add_special_tokens=False).input_ids)
    if others:
        # After a line break, so that no tokenizer takes a piece for the beginning of a text and adds a space.
        line = list(tokenizer("\n", add_special_tokens=False).input_ids)
    for piece in others:
        more = list(tokenizer(f"\n{piece}", add_special_tokens=False).input_ids)
        after_line = more[: len(line)] == line
        ids += more[len(line) :] if after_line else list(tokenizer(piece, add_special_tokens=False).input_ids)
    return ids
