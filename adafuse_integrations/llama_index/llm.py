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
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection, default_completion_to_prompt
from llama_index.core.program.streaming_utils import process_streaming_content_incremental
from llama_index.core.tools.types import BaseTool

from adafuse_engine import Chunk, Completion, DecodingConfig
from adafuse_engine.chat.turn import Turn, make_turn, normal_choice, schema_of, tool_of
from adafuse_engine.types import Prompt
from adafuse_integrations._shared import EnsembleFields, astream, stream
from adafuse_integrations.llama_index.messages import Answer, follows_react, message_in

__all__ = ["AdaFuseLLM"]

R = TypeVar("R", CompletionResponse, ChatResponse)
# Makes the response after a further piece of the text; and what an answer starts with.
_Add = Callable[[str, dict[str, Any], bool, bool], R]
_Start = Callable[[], _Add[R]]


class AdaFuseLLM(EnsembleFields, FunctionCallingLLM):
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
    tool_form
        How tool calls are written: ``json_tags``, or another of `adafuse_engine.chat.TOOL_FORMS`.

    All settings, ``stop`` included, can also be given to a call, and then hold for that call in place of the
    configured ones. Unknown arguments raise `adafuse_engine.UnknownArgumentError`.

    ``raw`` holds ``usage``, ``finish_reason``, ``model`` and ``adafuse_trace``, in a stream on the last
    response; those before it hold ``adafuse_chunk``: ``round``, ``confidence`` and ``fused``.

    The chat methods take ``tools`` (in OpenAI's form), ``tool_choice``, ``parallel_tool_calls`` and
    ``response_format`` as well. Where a tool must be called, and for a response format, the answer is held to the
    schema while it is written. Where a system message gives ReAct's instructions, the answer stops before a line
    that begins with ``Observation:``, unless the call brings a ``stop`` of its own.

    For true token counts set ``Settings.tokenizer = llm.tokenizer``.
    """

    is_chat_model: bool = Field(
        default=False, description="Whether query engines should send messages rather than plain text."
    )

    tool_form: str = Field(default="json_tags", description="How tool calls are written.")

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
            is_function_calling_model=True,
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
        return self._generate(_completion, self._text(prompt, formatted), self._settings(**kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` for async callers; cancelling it stops the engine."""
        return await self._agenerate(_completion, self._text(prompt, formatted), self._settings(**kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages, each member through its own chat template."""
        return self._generate(*self._turn(messages, kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for async callers; cancelling it stops the engine."""
        return await self._agenerate(*self._turn(messages, kwargs))

    # The callbacks' wrapper of a stream drops the generator it wraps without closing it, and an event handler
    # that keeps the exception keeps that generator alive: the engine would go on writing for nobody. So these
    # four hold the generator themselves and close it.

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Continue a text piece by piece; closing it stops the engine."""
        source = self._stream(_completion, self._text(prompt, formatted), self._settings(**kwargs))
        observed = llm_completion_callback()(lambda llm, prompt, **kwargs: source)
        return _closing(observed(self, prompt, formatted=formatted, **kwargs), source)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` for async callers."""
        source = self._astream(_completion, self._text(prompt, formatted), self._settings(**kwargs))

        @llm_completion_callback()
        async def observed(llm: LLM, prompt: str, **kwargs: Any) -> CompletionResponseAsyncGen:
            return source

        return _aclosing(await observed(self, prompt, formatted=formatted, **kwargs), source)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer chat messages piece by piece; closing it stops the engine."""
        source = self._stream(*self._turn(messages, kwargs))
        observed = llm_chat_callback()(lambda llm, messages, **kwargs: source)
        return _closing(observed(self, messages, **kwargs), source)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`stream_chat` for async callers."""
        source = self._astream(*self._turn(messages, kwargs))

        @llm_chat_callback()
        async def observed(llm: LLM, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
            return source

        return _aclosing(await observed(self, messages, **kwargs), source)

    # ---- tools

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            new = user_msg if isinstance(user_msg, ChatMessage) else ChatMessage(user_msg, role=MessageRole.USER)
            messages.append(new)
        prepared = {"messages": messages, **kwargs}
        if tools:
            prepared["tools"] = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
            prepared["tool_choice"] = tool_choice or ("any" if tool_required else "auto")
            prepared["parallel_tool_calls"] = allow_parallel_tool_calls
        return prepared

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a response, whole or still streaming; those whose arguments cannot be read are left out.

        Raises `ValueError` if there are none and ``error_on_no_tool_call``.
        """
        calls = [
            ToolSelection(tool_id=b.tool_call_id or "", tool_name=b.tool_name, tool_kwargs=b.tool_kwargs)
            for b in response.message.blocks
            if isinstance(b, ToolCallBlock) and isinstance(b.tool_kwargs, dict)
        ]
        if not calls and error_on_no_tool_call:
            raise ValueError(f"the answer calls no tool: {response.message.content or ''!r:.200}")
        return calls

    # The framework's own streaming programs do not say that their tool must be called.

    def _structured_stream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        found = None
        messages = prompt.format_messages(llm=self, **prompt_args)
        for response in self.stream_chat(messages, **{**(llm_kwargs or {}), "response_format": output_cls}):
            found = process_streaming_content_incremental(response, output_cls, found)
            yield found

    async def _structured_astream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        messages = prompt.format_messages(llm=self, **prompt_args)
        options = {**(llm_kwargs or {}), "response_format": output_cls}

        async def objects() -> AsyncGenerator[Any, None]:
            found = None
            async for response in await self.astream_chat(messages, **options):
                found = process_streaming_content_incremental(response, output_cls, found)
                yield found

        return objects()

    # ---- prompts

    def _text(self, prompt: str, formatted: bool) -> str:
        """The prompt in its template and with the system prompt; a formatted one has both already."""
        if formatted:
            return prompt
        return self._extend_prompt((self.completion_to_prompt or default_completion_to_prompt)(prompt))

    def _turn(
        self, messages: Sequence[ChatMessage], options: dict[str, Any]
    ) -> tuple[_Start[ChatResponse], Prompt, DecodingConfig]:
        """How the answer is read, what the engine is asked, and with which settings.

        The messages go through the members' own templates, or through ``messages_to_prompt`` where that was given
        and there are no tools, which only templates can tell.
        """
        options = dict(options)
        messages = list(messages)
        if self.system_prompt and not any(_says(m, self.system_prompt) for m in messages):
            messages = self._extend_messages(messages)
        tools = [tool_of(tool) for tool in options.pop("tools", None) or ()]
        choice = normal_choice(options.pop("tool_choice", None), tools)
        parallel = options.pop("parallel_tool_calls", options.pop("allow_parallel_tool_calls", True))
        schema = schema_of(options.pop("response_format", None))
        form = options.pop("tool_form", self.tool_form)
        if "stop" not in options and follows_react(messages):
            options["stop"] = [*(self._settings().stop), "\nObservation:"]
        settings = self._settings(**options)
        if self.messages_to_prompt not in (None, default_messages_to_prompt) and not tools and schema is None:
            return _chat(None), self.messages_to_prompt(messages), settings
        turn = make_turn(
            [message_in(i, m) for i, m in enumerate(messages)],
            settings,
            tools=tools,
            choice=choice,
            form=form,
            parallel=bool(parallel),
            schema=schema,
        )
        return _chat(turn), turn.prompt, turn.settings

    # ---- the engine, without events

    def _generate(self, start: _Start[R], prompt: Prompt, settings: DecodingConfig) -> R:
        completion = self._ensemble().generate(prompt, **settings.model_dump())
        return start()(completion.text, self._raw(completion), True, False)

    async def _agenerate(self, start: _Start[R], prompt: Prompt, settings: DecodingConfig) -> R:
        engine = await self._aensemble()
        completion = await engine.agenerate(prompt, **settings.model_dump())
        return start()(completion.text, self._raw(completion), True, False)

    def _stream(self, start: _Start[R], prompt: Prompt, settings: DecodingConfig) -> Generator[R, None, None]:
        add = start()
        with stream(self._ensemble(), prompt, settings) as chunks:
            for chunk in chunks:
                yield add(chunk.text, self._raw_chunk(chunk), chunk.completion is not None, True)

    async def _astream(self, start: _Start[R], prompt: Prompt, settings: DecodingConfig) -> AsyncGenerator[R, None]:
        add = start()
        async with astream(await self._aensemble(), prompt, settings) as chunks:
            async for chunk in chunks:
                yield add(chunk.text, self._raw_chunk(chunk), chunk.completion is not None, True)

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


def _completion() -> _Add[CompletionResponse]:
    text = ""

    def add(piece: str, raw: dict[str, Any], last: bool, streams: bool) -> CompletionResponse:
        nonlocal text
        text += piece
        return CompletionResponse(text=text, raw=raw, delta=piece if streams else None)

    return add


def _chat(turn: Turn | None) -> _Start[ChatResponse]:
    def start() -> _Add[ChatResponse]:
        answer = Answer(turn)
        return lambda piece, raw, last, streams: answer.add(piece, raw, last=last, delta=streams)

    return start


def _says(message: ChatMessage, text: str) -> bool:
    return message.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER) and text in (message.content or "")


def _closing(events: Generator[R, None, None], source: Generator[R, None, None]) -> Generator[R, None, None]:
    with closing(source), closing(events):
        yield from events


async def _aclosing(events: AsyncGenerator[R, None], source: AsyncGenerator[R, None]) -> AsyncGenerator[R, None]:
    async with aclosing(source), aclosing(events):
        async for response in events:
            yield response
