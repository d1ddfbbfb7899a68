"""A prompt -> a member's token ids: raw text as it is, chat messages through the member's own template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.types import Message, Prompt

__all__ = ["prompt_ids"]

# For base models, which have no template: a transcript that they can go on with.
DEFAULT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content | trim }}\n\n"
    "{% elif m.role == 'user' %}User: {{ m.content | trim }}\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, ends: frozenset[int], chat_template: str | None = None
) -> list[int]:
    """Token ids of a prompt, with one BOS where the tokenizer wants one and no end marker of its own.

    Raises `InvalidArgumentError` for messages that the template refuses.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt).input_ids)
        # Some tokenizers close what they encode; the text goes on here.
        if ids and ids[-1] in ends and list(tokenizer("").input_ids)[-1:] == ids[-1:]:
            ids.pop()
        return _one_bos(tokenizer, ids)
    messages = [_message(m) for m in prompt]
    template = chat_template or getattr(tokenizer, "chat_template", None) or DEFAULT_TEMPLATE
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise InvalidArgumentError(f"prompt: the chat template refuses these messages: {error}") from error
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    bos = tokenizer.bos_token_id
    if bos is not None and bos in list(tokenizer("").input_ids):
        ids = [bos, *ids]
    return _one_bos(tokenizer, ids)


def _one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Without a second BOS, as a prompt that already spells one would get."""
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def _message(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise InvalidArgumentError(
            f"prompt: a message is a dict with role and content, not {type(message).__name__} {message!r:.60}"
        )
    return dict(message)
