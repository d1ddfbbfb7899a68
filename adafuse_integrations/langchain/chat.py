"""An AdaFuse ensemble as a LangChain chat model, with tools and structured output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, Field, SecretStr

from adafuse_engine import Chunk, Completion, InvalidArgumentError
from adafuse_engine.chat.turn import Turn, make_turn, normal_choice, schema_of, text_of, tool_of
from adafuse_integrations._shared import EnsembleFields, astream, stream
from adafuse_integrations.langchain.identity import identities
from adafuse_integrations.langchain.messages import call_chunks, calls_of, messages_in, usage_of

__all__ = ["ChatAdaFuse"]

# What LangChain passes along for others to read.
_NOT_OURS = ("strict", "ls_structured_output_format", "stream", "stream_usage")


class ChatAdaFuse(EnsembleFields, BaseChatModel):
    """An ensemble of language models as one LangChain chat model: ``ChatAdaFuse(models=[...])``.

    Messages and tools go through each member's own chat template. Tool calls are written as text in one form
    for all members (``tool_form``) and read back while they stream. With ``tool_choice`` "any" or a tool's
    name, and for structured output, the answer is held to the schema while it is written, so that it parses
    whatever the members are like; with "auto" a call is held to its tool's schema once it is begun.

    Parameters
    ----------
    models, engine, preset, threshold, max_tokens, temperature, seed, stop
        As in `AdaFuseLLM`; every other field of `adafuse_engine.DecodingConfig` may be given as well, here or
        to a call. Where an answer is held to a schema, ``stop`` does not apply.
    tool_form
        How tool calls are written: ``json_tags``, or another of `adafuse_engine.chat.TOOL_FORMS`.
    timeout
        Seconds an answer should take: its ``deadline_s``. The ensemble does less to keep it; it never fails.
    streaming
        Let ``invoke`` stream to callbacks.
    max_retries, api_key
        Accepted, as of every chat model. Local members need neither.

    ``response_metadata`` holds ``model_name``, ``finish_reason``, ``usage`` and ``adafuse_trace``, in a stream
    on the last chunk, which also brings ``usage_metadata``.
    """

    tool_form: str = Field(default="json_tags", description="How tool calls are written.")
    timeout: float | None = Field(default=None, description="Seconds an answer should take: its `deadline_s`.")
    streaming: bool = Field(default=False, description="Let `invoke` stream to callbacks.")
    max_retries: int | None = Field(default=None, description="Local members need no retries.")
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False, description="Not needed.")

    @property
    def _llm_type(self) -> str:
        return "adafuse-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {
            "model_name": self.model_name,
            "members": identities(self._members(), self.engine),
            "decoding": self._settings().model_dump(mode="json"),
            "tool_form": self.tool_form,
        }

    def _given(self) -> dict[str, Any]:
        given = super()._given()
        return given if self.timeout is None else {"deadline_s": self.timeout, **given}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        settings = self._settings(
            stop, **{k: v for k, v in kwargs.items() if k in type(self._settings()).model_fields}
        )
        params = LangSmithParams(
            ls_provider="adafuse",
            ls_model_type="chat",
            ls_model_name=str(kwargs.get("model", self.model_name)),
            ls_temperature=settings.temperature,
            ls_max_tokens=settings.max_tokens,
        )
        if settings.stop:
            params["ls_stop"] = list(settings.stop)
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            name=self.model_name,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
        )
        settings = self._settings()
        profile["max_output_tokens"] = settings.max_tokens
        # Models that are named only are not loaded to find out.
        if self.engine is not None:
            profile["max_input_tokens"] = self.engine.context_window
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of the text by the first member's tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._ensemble().tokenize(text)

    # ---- tools and schemas

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model like it that may call tools.

        Parameters
        ----------
        tools
            LangChain tools, functions, pydantic classes, TypedDicts, or dicts in OpenAI's form.
        tool_choice
            ``"auto"`` (may call; the default), ``"any"`` or ``"required"`` or True (must call), ``"none"``, a
            tool's name, or OpenAI's dict for one.
        parallel_tool_calls
            Whether an answer may hold several calls.
        **kwargs
            Settings, as ``bind`` takes them.

        Raises `adafuse_engine.InvalidArgumentError` for a choice that no tool has.
        """
        formatted = [convert_to_openai_tool(tool) for tool in tools]
        choice = normal_choice(tool_choice, [tool_of(tool) for tool in formatted])
        if not parallel_tool_calls:
            kwargs["parallel_tool_calls"] = False
        return super().bind(tools=formatted, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """A model like it whose answers follow a schema.

        Parameters
        ----------
        schema
            A pydantic class (answers are its objects), a TypedDict, a JSON schema or a dict in OpenAI's form
            (answers are dicts).
        method
            ``json_schema``: the answer is that JSON. ``function_calling``: it calls a tool of that schema.
            ``json_mode``: it is some JSON object; tell the model in the prompt what should be in it.
        include_raw
            Answer with a dict of ``raw`` (the message), ``parsed`` and ``parsing_error``.
        strict
            Accepted: answers are always held to the schema, ``json_mode`` aside.

        Raises `adafuse_engine.InvalidArgumentError` for an unknown method.
        """
        shown = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        parser: OutputParserLike[Any]
        if method == "function_calling":
            name = convert_to_openai_tool(schema)["function"]["name"]
            llm = self.bind_tools(
                [schema],
                tool_choice=name,
                parallel_tool_calls=False,
                ls_structured_output_format=shown,
                **kwargs,
            )
            if isinstance(schema, type) and is_class:
                parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
            else:
                parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        elif method in ("json_schema", "json_mode"):
            wanted = {"type": "object"} if method == "json_mode" else convert_to_json_schema(schema)
            format_ = {"type": "json_schema", "json_schema": {"schema": wanted}}
            if method == "json_mode":
                format_ = {"type": "json_object"}
            llm = super().bind(response_format=format_, ls_structured_output_format=shown, **kwargs)
            if isinstance(schema, type) and is_class:
                parser = PydanticOutputParser[Any](pydantic_object=schema)
            else:
                parser = JsonOutputParser()
        else:
            raise InvalidArgumentError(
                f"method: one of json_schema, function_calling, json_mode (got {method!r:.40})"
            )
        if not include_raw:
            return llm | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    def _turn(self, messages: Sequence[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]) -> Turn:
        """What the engine is asked. Raises for wrong arguments and messages."""
        options = {name: value for name, value in options.items() if name not in _NOT_OURS}
        tools = [tool_of(convert_to_openai_tool(tool)) for tool in options.pop("tools", None) or ()]
        choice = normal_choice(options.pop("tool_choice", None), tools)
        parallel = options.pop("parallel_tool_calls", None)
        schema = schema_of(options.pop("response_format", None))
        form = options.pop("tool_form", self.tool_form)
        return make_turn(
            messages_in(messages),
            self._settings(stop, **options),
            tools=tools,
            choice=choice,
            form=form,
            parallel=parallel is not False,
            schema=schema,
        )

    # ---- answers

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        turn = self._turn(messages, stop, kwargs)
        return self._result(turn, self._ensemble().generate(turn.prompt, **turn.settings.model_dump()))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        turn = self._turn(messages, stop, kwargs)
        engine = await self._aensemble()
        return self._result(turn, await engine.agenerate(turn.prompt, **turn.settings.model_dump()))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # The base class tells callbacks of new tokens.
        turn = self._turn(messages, stop, kwargs)
        reader = _Reader(self, turn)
        with stream(self._ensemble(), turn.prompt, turn.settings) as chunks:
            for chunk in chunks:
                yield from reader.read(chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        turn = self._turn(messages, stop, kwargs)
        reader = _Reader(self, turn)
        async with astream(await self._aensemble(), turn.prompt, turn.settings) as chunks:
            async for chunk in chunks:
                for piece in reader.read(chunk):
                    yield piece

    def _result(self, turn: Turn, completion: Completion) -> ChatResult:
        text, calls = turn.read(completion.text)
        message = AIMessage(
            content=text,
            response_metadata=self._metadata(completion, called=bool(calls)),
            usage_metadata=usage_of(completion.usage),
            **calls_of(calls),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _metadata(self, completion: Completion, *, called: bool) -> dict[str, Any]:
        reason = completion.finish_reason
        return {
            "model_name": self.model_name,
            "model_provider": "adafuse",
            "finish_reason": "tool_calls" if called and reason == "stop" else reason,
            "usage": completion.usage.to_dict(),
            "adafuse_trace": completion.trace.to_dict(),
        }

    # ---- the cache

    def _generate_with_cache(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return super(ChatAdaFuse, self._cacheable(kwargs))._generate_with_cache(messages, *args, **kwargs)

    async def _agenerate_with_cache(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        chat = self._cacheable(kwargs)
        return await super(ChatAdaFuse, chat)._agenerate_with_cache(messages, *args, **kwargs)

    def _cacheable(self, options: Mapping[str, Any]) -> ChatAdaFuse:
        """Itself, or a copy that stays away from the global cache: what is drawn without a seed is drawn anew."""
        settings = self._settings()
        temperature = options.get("temperature", settings.temperature)
        if self.cache is None and temperature and options.get("seed", settings.seed) is None:
            return self.model_copy(update={"cache": False})
        return self


class _Reader:
    """An answer's chunks -> LangChain's, tool calls in pieces as they are written."""

    def __init__(self, chat: ChatAdaFuse, turn: Turn) -> None:
        self._chat = chat
        self._parser = turn.parser()
        self._started: set[int] = set()
        self._called = False

    def read(self, chunk: Chunk) -> Iterator[ChatGenerationChunk]:
        """One chunk, or none where all is held back, as what may be the beginning of a call."""
        text, calls = chunk.text, []
        if self._parser is not None:
            events = self._parser.feed(chunk.text)
            if chunk.completion is not None:
                events = [*events, *self._parser.close()]
            text, calls = text_of(events), call_chunks(events, self._started)
            self._called = self._called or bool(calls)
        if chunk.completion is not None:
            message = AIMessageChunk(
                content=text,
                tool_call_chunks=calls,
                usage_metadata=usage_of(chunk.completion.usage),
                response_metadata=self._chat._metadata(chunk.completion, called=self._called),
                chunk_position="last",
            )
        elif text or calls:
            message = AIMessageChunk(content=text, tool_call_chunks=calls)
        else:
            return
        yield ChatGenerationChunk(message=message)
