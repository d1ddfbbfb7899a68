"""An AdaFuse ensemble as a LlamaIndex LLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing
from typing import Any, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as default_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, default_completion_to_prompt

from adafuse_engine import Chunk, Completion, Message, PromptError
from adafuse_integrations._shared import EnsembleFields, astream, stream

__all__ = ["AdaFuseLLM"]

R = TypeVar("R", CompletionResponse, ChatResponse)
_Make = Callable[[str, dict[str, Any], str | None], R]
_Prompt = str | list[Message]

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


class AdaFuseLLM(EnsembleFields, LLM):
    """An ensemble of language models as one LlamaIndex LLM: ``AdaFuseLLM(models=[...], threshold=0.7)``.

    Parameters
    ----------
    models
        The members: model names, dicts or `adafuse_engine.MemberConfig`. They are loaded at first use, once
        per process: LLMs with the same models share one engine.
    engine
        A ready `adafuse_engine.Engine`, in place of ``models``.
    preset, threshold, max_tokens, temperature, seed, stop
        The usual settings. Every other field of `adafuse_engine.DecodingConfig` may be given as well.
    is_chat_model
        Whether query engines and programs should send chat messages, for each member's own chat template.
        Off, they send plain text, which base models need: turn it on if all members are instruction models.

    All settings, ``stop`` included, can also be given to a call, and then hold for that call in place of the
    configured ones. Unknown arguments raise `adafuse_engine.UnknownArgumentError`.

    ``raw`` holds ``usage``, ``finish_reason``, ``model`` and ``adafuse_trace``, in a stream on the last
    response; those before it hold ``adafuse_chunk``: ``round``, ``confidence`` and ``fused``.

    For true token counts set ``Settings.tokenizer = llm.tokenizer``.
    """

    is_chat_model: bool = Field(
        default=False, description="Whether query engines should send messages rather than plain text."
    )

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "AdaFuseLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The smallest context window among the members, ``max_tokens``, and what kind of model this is."""
        return LLMMetadata(
            context_window=self._ensemble().context_window,
            num_output=self._settings().max_tokens,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=False,
            model_name=self.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """What observers are told of this LLM with every call."""
        # Not the metadata: they need the loaded models, and the event loop must not wait for those.
        return {
            "class_name": self.class_name(),
            "model_name": self.model_name,
            "is_chat_model": self.is_chat_model,
            **self._settings().model_dump(mode="json"),
        }

    def tokenizer(self, text: str) -> list[int]:
        """Token ids of the text by the first member's tokenizer, for ``Settings.tokenizer``."""
        return self._ensemble().tokenize(text)

    # ---- the eight methods; none calls another, so that each call is one event and is counted once

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text."""
        return self._generate(_completion, self._text(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` for async callers; cancelling it stops the engine."""
        return await self._agenerate(_completion, self._text(prompt, formatted), kwargs)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages, each member through its own chat template."""
        return self._generate(_answer, self._messages(messages), kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for async callers; cancelling it stops the engine."""
        return await self._agenerate(_answer, self._messages(messages), kwargs)

    # The callbacks' wrapper of a stream drops the generator it wraps without closing it, and an event handler
    # that keeps the exception keeps that generator alive: the engine would go on writing for nobody. So these
    # four hold the generator themselves and close it.

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Continue a text piece by piece; closing it stops the engine."""
        source = self._stream(_completion, self._text(prompt, formatted), kwargs)
        observed = llm_completion_callback()(lambda llm, prompt, **kwargs: source)
        return _closing(observed(self, prompt, formatted=formatted, **kwargs), source)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` for async callers."""
        source = self._astream(_completion, self._text(prompt, formatted), kwargs)

        @llm_completion_callback()
        async def observed(llm: LLM, prompt: str, **kwargs: Any) -> CompletionResponseAsyncGen:
            return source

        return _aclosing(await observed(self, prompt, formatted=formatted, **kwargs), source)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer chat messages piece by piece; closing it stops the engine."""
        source = self._stream(_answer, self._messages(messages), kwargs)
        observed = llm_chat_callback()(lambda llm, messages, **kwargs: source)
        return _closing(observed(self, messages, **kwargs), source)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`stream_chat` for async callers."""
        source = self._astream(_answer, self._messages(messages), kwargs)

        @llm_chat_callback()
        async def observed(llm: LLM, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
            return source

        return _aclosing(await observed(self, messages, **kwargs), source)

    # ---- prompts

    def _text(self, prompt: str, formatted: bool) -> str:
        """The prompt in its template and with the system prompt; a formatted one has both already."""
        if formatted:
            return prompt
        return self._extend_prompt((self.completion_to_prompt or default_completion_to_prompt)(prompt))

    def _messages(self, messages: Sequence[ChatMessage]) -> _Prompt:
        """Messages for the members' own templates, or a text where ``messages_to_prompt`` was given."""
        messages = list(messages)
        if self.system_prompt and not any(_says(m, self.system_prompt) for m in messages):
            messages = self._extend_messages(messages)
        if self.messages_to_prompt in (None, default_messages_to_prompt):
            return [_message(i, m) for i, m in enumerate(messages)]
        return self.messages_to_prompt(messages)

    # ---- the engine, without events

    def _generate(self, make: _Make[R], prompt: _Prompt, kwargs: dict[str, Any]) -> R:
        options = self._settings(**kwargs).model_dump()
        completion = self._ensemble().generate(prompt, **options)
        return make(completion.text, self._raw(completion), None)

    async def _agenerate(self, make: _Make[R], prompt: _Prompt, kwargs: dict[str, Any]) -> R:
        options = self._settings(**kwargs).model_dump()
        engine = await self._aensemble()
        completion = await engine.agenerate(prompt, **options)
        return make(completion.text, self._raw(completion), None)

    def _stream(self, make: _Make[R], prompt: _Prompt, kwargs: dict[str, Any]) -> Generator[R, None, None]:
        settings = self._settings(**kwargs)  # wrong arguments are refused before the first next()

        def responses() -> Generator[R, None, None]:
            text = ""
            with stream(self._ensemble(), prompt, settings) as chunks:
                for chunk in chunks:
                    text += chunk.text
                    yield make(text, self._raw_chunk(chunk), chunk.text)

        return responses()

    def _astream(self, make: _Make[R], prompt: _Prompt, kwargs: dict[str, Any]) -> AsyncGenerator[R, None]:
        settings = self._settings(**kwargs)

        async def responses() -> AsyncGenerator[R, None]:
            text = ""
            async with astream(await self._aensemble(), prompt, settings) as chunks:
                async for chunk in chunks:
                    text += chunk.text
                    yield make(text, self._raw_chunk(chunk), chunk.text)

        return responses()

    def _raw(self, completion: Completion) -> dict[str, Any]:
        return {
            "usage": completion.usage.to_dict(),
            "finish_reason": completion.finish_reason,
            "model": self.model_name,
            "adafuse_trace": completion.trace.to_dict(),
        }

    def _raw_chunk(self, chunk: Chunk) -> dict[str, Any]:
        if chunk.completion is not None:
            return self._raw(chunk.completion)
        return {"adafuse_chunk": {"round": chunk.round, "confidence": chunk.confidence, "fused": chunk.fused}}


def _completion(text: str, raw: dict[str, Any], delta: str | None) -> CompletionResponse:
    return CompletionResponse(text=text, raw=raw, delta=delta)


def _answer(text: str, raw: dict[str, Any], delta: str | None) -> ChatResponse:
    # Nothing goes into additional_kwargs: LlamaIndex writes those into the next prompt.
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, raw=raw, delta=delta)


def _message(index: int, message: ChatMessage) -> Message:
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise PromptError(
                f"message {index} ({message.role.value}) holds a {type(block).__name__}, but members read "
                "nothing but text: leave it out or put it into words"
            )
    return Message(_ROLES.get(message.role, message.role.value), message.content or "")


def _says(message: ChatMessage, text: str) -> bool:
    return message.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER) and text in (message.content or "")


def _closing(events: Generator[R, None, None], source: Generator[R, None, None]) -> Generator[R, None, None]:
    with closing(source), closing(events):
        yield from events


async def _aclosing(events: AsyncGenerator[R, None], source: AsyncGenerator[R, None]) -> AsyncGenerator[R, None]:
    async with aclosing(source), aclosing(events):
        async for response in events:
            yield response
