"""What clients send: OpenAI's fields, and any setting of the engine beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from adafuse_engine.config import DecodingConfig
from adafuse_engine.errors import InvalidArgumentError, UnknownArgumentError

__all__ = ["ChatRequest", "CompletionRequest", "Request", "StreamOptions"]

IGNORED: Final = frozenset(
    {"metadata", "modalities", "prediction", "prompt_cache_key", "reasoning_effort", "safety_identifier"}
    | {"service_tier", "store", "user", "verbosity"}
)
"""Fields that change nothing about an answer here."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
}
"""Fields of OpenAI that an ensemble cannot follow, with the values at which they ask for nothing."""


class StreamOptions(BaseModel):
    """``include_usage``: end the stream with a chunk that has the usage and no choices."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class Request(BaseModel):
    """The fields that both kinds of request have. ``trace`` is ours: put rounds and trace into the answer."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    trace: bool = False

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> dict[str, Any]:
        """What the request sets of `DecodingConfig`.

        Raises `InvalidArgumentError` for what OpenAI's servers can do and an ensemble cannot,
        `UnknownArgumentError` for what neither knows.
        """
        named = {k: getattr(self, k) for k in ("max_tokens", "stop", "temperature", "seed")}
        options = {k: v for k, v in named.items() if v is not None}
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or value is None:
                continue
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise InvalidArgumentError(f"{name}: an ensemble has no such setting; leave it out")
            elif name in DecodingConfig.model_fields:
                options[name] = value
            else:
                known = {*DecodingConfig.model_fields, *type(self).model_fields}
                raise UnknownArgumentError(name, known, "field")
        return options


class CompletionRequest(Request):
    """``POST /v1/completions``. Several prompts give a choice each."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def prompts(self) -> list[str]:
        """The texts to continue. Raises `InvalidArgumentError` for token ids, for each member has its own."""
        given: Sequence[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        texts = [p for p in given if isinstance(p, str)]
        if len(texts) < len(given):
            raise InvalidArgumentError(
                "prompt: token ids mean something else to each member; give text (langchain-openai: "
                "tiktoken_enabled=False)"
            )
        if not texts:
            raise InvalidArgumentError("prompt: the list is empty; give at least one text")
        return texts

    @property
    def alternatives(self) -> int | None:
        """How many candidates to tell with each piece; None for no log-probabilities at all."""
        return self.logprobs


class ChatRequest(Request):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    response_format: dict[str, Any] | None = None

    @property
    def alternatives(self) -> int | None:
        """How many candidates to tell with each piece; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def options(self) -> dict[str, Any]:
        """As in `Request`; ``max_completion_tokens`` is the newer name of ``max_tokens``."""
        options = super().options()
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        return options
