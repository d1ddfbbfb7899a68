"""A chat template: which one a request takes, what it can render, and its rendering."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.messages import tool_schema
from adafuse_engine.types import Message, Tool, ToolCall

__all__ = ["DEFAULT_TEMPLATE", "Abilities", "abilities_of", "render", "template_of", "wire"]

# For base models, which have no template: a transcript that they can go on with.
DEFAULT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content | trim }}\n\n"
    "{% elif m.role == 'user' %}User: {{ m.content | trim }}\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_NINE = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a template renders by itself, and how it wants that.

    ``system``: a first system message; ``systems``: several, anywhere. ``alternates``: it refuses or loses
    neighbours of the same role, or a history that no user begins. ``tools``: tools' schemas. ``calls``: an
    assistant's calls and the tool messages that answer them; ``calls_with_text``: beside content; and
    ``parallel_calls``: several of one message. ``blocks``: content only as a list of text blocks.
    ``text_arguments``: calls' arguments only as JSON text. ``nine_ids``: call ids of nine letters and digits.
    ``spelled``: how it writes a call, among other text; empty if it writes none.
    """

    system: bool = False
    systems: bool = False
    alternates: bool = True
    tools: bool = False
    calls: bool = False
    calls_with_text: bool = False
    parallel_calls: bool = False
    blocks: bool = False
    text_arguments: bool = False
    nine_ids: bool = False
    spelled: str = field(default="", compare=False, repr=False)


def template_of(tokenizer: PreTrainedTokenizerBase, given: str | None, *, tools: bool) -> str:
    """The template text for a request: the given one, else the tokenizer's, else `DEFAULT_TEMPLATE`.

    Of several named templates it is ``tool_use`` for a request with tools and ``default`` otherwise; ``given``
    may be a name too. Raises `InvalidArgumentError` if none of the names fits.
    """
    known = getattr(tokenizer, "chat_template", None)
    if not isinstance(known, dict):
        return given or known or DEFAULT_TEMPLATE
    if given:
        return str(known.get(given, given))
    for name in ("tool_use", "default") if tools else ("default",):
        if name in known:
            return str(known[name])
    raise InvalidArgumentError(
        f"chat_template: the tokenizer has several and none is named default; give one of {', '.join(known)}"
    )


def render(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """The messages as the template writes them, in transformers' sandbox, up to where the answer begins.

    Raises whatever the template raises: it is foreign code.
    """
    text: str = tokenizer.apply_chat_template(
        list(messages), tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return text


def wire(messages: Sequence[Message], can: Abilities) -> list[dict[str, Any]]:
    """The messages as the dicts that a template of these abilities reads."""
    return [_wire(message, can) for message in messages]


def _wire(message: Message, can: Abilities) -> dict[str, Any]:
    content: Any = [{"type": "text", "text": message.content}] if can.blocks else message.content
    wired = {"role": message.role, "content": content}
    # Only keys that say something: templates ask whether a key is there, not what it holds.
    if message.name is not None:
        wired["name"] = message.name
    if message.tool_call_id is not None:
        wired["tool_call_id"] = _call_id(message.tool_call_id, can)
    if message.tool_calls:
        wired["tool_calls"] = [
            {
                "id": _call_id(call.id, can),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _json_text(call) if can.text_arguments else dict(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return wired


def _json_text(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _call_id(given: str, can: Abilities) -> str:
    """The id, or nine letters and digits made from it: the same ones for a call and for its result."""
    if not can.nine_ids or _NINE.fullmatch(given):
        return given
    digits = string.ascii_letters + string.digits
    return "".join(digits[byte % len(digits)] for byte in hashlib.sha256(given.encode()).digest()[:9])


# ---- Probing

_probed: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, bool], Abilities]] = WeakKeyDictionary()
_probing = threading.Lock()

# Words that no template has of its own and that no filter changes.
_SYSTEM = Message("system", "zqsystem")
_SYSTEM_2 = Message("system", "zqsecond")
_SYSTEM_3 = Message("system", "zqlast")
_USER = Message("user", "zquser")
_USER_2 = Message("user", "zqagain")
_ANSWER = Message("assistant", "zqanswer")
_ANSWER_2 = Message("assistant", "zqmore")
_TOOL = Tool("zqtool", "zqpurpose", {"type": "object", "properties": {"zqkey": {"type": "string"}}})
_CALL = ToolCall("call_zq01234567", "zqtool", {"zqkey": "zqvalue"})
_CALL_2 = ToolCall("call_zq76543210", "zqother", {"zqkey": "zqworth"})
_CALLING = Message("assistant", "", (_CALL,))
_RESULT = Message("tool", "zqresult", (), _CALL.id, _CALL.name)
_RESULT_2 = Message("tool", "zqoutcome", (), _CALL_2.id, _CALL_2.name)


def abilities_of(tokenizer: PreTrainedTokenizerBase, template: str, *, tools: bool) -> Abilities:
    """What the template renders, for requests with or without tools. Found by trying, once per tokenizer."""
    with _probing:
        known = _probed.setdefault(tokenizer, {})
        if (template, tools) not in known:
            known[template, tools] = _probe(tokenizer, template, tools)
        return known[template, tools]


def _probe(tokenizer: PreTrainedTokenizerBase, template: str, tools: bool) -> Abilities:
    schemas: list[dict[str, Any]] | None = None

    def shows(can: Abilities, *messages: Message, also: Sequence[str] = ()) -> bool:
        """Whether all these contents, calls and words come out."""
        words = [*also, *(m.content for m in messages)]
        words += [w for m in messages for c in m.tool_calls for w in (c.name, *c.arguments.values())]
        try:
            text = render(tokenizer, template, wire(messages, can), schemas)
        except Exception:  # a template may raise anything
            return False
        return all(word in text for word in words)

    can = Abilities()
    if not shows(can, _USER) and shows(replace(can, blocks=True), _USER):
        can = replace(can, blocks=True)
    if tools:
        schemas = [tool_schema(_TOOL)]
        if shows(can, _USER, also=("zqtool", "zqpurpose", "zqkey")):
            can = replace(can, tools=True)
        else:
            # Such a request will come without schemas; probe on as it will come.
            schemas = None
    system = shows(can, _SYSTEM, _USER)
    neighbours = ((_USER, _USER_2), (_USER, _ANSWER, _ANSWER_2, _USER_2), (_ANSWER, _USER))
    can = replace(
        can,
        system=system,
        systems=system and shows(can, _SYSTEM, _SYSTEM_2, _USER, _ANSWER, _SYSTEM_3, _USER_2),
        alternates=not all(shows(can, *messages) for messages in neighbours),
    )
    for nine, text in itertools.product((False, True), (False, True)):
        shaped = replace(can, nine_ids=nine, text_arguments=text)
        # A result may be the last message or not; either way it must come out.
        if shows(shaped, _USER, _CALLING, _RESULT) and shows(shaped, _USER, _CALLING, _RESULT, _ANSWER, _USER_2):
            beside = replace(_CALLING, content="zqbeside")
            both = replace(_CALLING, tool_calls=(_CALL, _CALL_2))
            return replace(
                shaped,
                spelled=render(tokenizer, template, wire([_USER, _CALLING, _RESULT, _ANSWER], shaped)),
                calls=True,
                calls_with_text=shows(shaped, _USER, beside, _RESULT),
                parallel_calls=shows(shaped, _USER, both, _RESULT, _RESULT_2),
            )
    return can
