"""Configuration: what the members are and how they decode. Frozen, checked once, one schema for every face."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from adafuse_engine.errors import ConfigError, InvalidArgumentError, UnknownArgumentError, check_text

__all__ = [
    "DEFAULT_MODELS",
    "PRESETS",
    "ConfidenceKind",
    "DecodingConfig",
    "EngineConfig",
    "FusionRule",
    "Gate",
    "MemberConfig",
    "Mix",
    "PresetName",
    "RemoteConfig",
    "Scaling",
    "ServerConfig",
    "member_configs",
]

Gate: TypeAlias = Literal["never", "any_certain"]
CatchUp: TypeAlias = Literal["eager", "lazy"]
ConfidenceKind: TypeAlias = Literal["margin", "entropy", "max_prob"]
Scaling: TypeAlias = Literal["top_k", "temperature", "nucleus", "entropy_nucleus"]
FusionRule: TypeAlias = Literal["mean_nll", "bits_per_byte", "word_posterior", "vote"]
Mix: TypeAlias = Literal["auto", "geometric", "arithmetic"]
PresetName: TypeAlias = Literal["default", "paper", "unite"]

DEFAULT_MODELS = ("bundled:smollm2-135m-instruct", "bundled:gemma-3-270m")
"""What commands load where no model is named."""

REMOTE = re.compile(r"(?:openai\+)?https?://")
"""How the names of remote models begin."""

PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "gate": "never",
        "fusion": "word_posterior",
        "mix": "geometric",
        "confidence": "margin",
        "threshold": 0.7,
        "max_words": 3,
        "max_word_tokens": 16,
        "branches": 3,
        "scaling": "top_k",
        "word_end_mass": True,
    },
    # The published method: arXiv 2601.06022, with the settings of its experiments.
    "paper": {
        "gate": "never",
        "fusion": "mean_nll",
        "mix": "geometric",
        "confidence": "margin",
        "threshold": 0.7,
        "max_words": 3,
        "max_word_tokens": 16,
        "branches": 3,
        "scaling": "top_k",
        "word_end_mass": True,
    },
    # Token by token, from the idea of UniTE (arXiv 2410.03777): the union of every member's most probable tokens,
    # as text, and the mean of the members' probabilities of them.
    "unite": {
        "gate": "never",
        "fusion": "word_posterior",
        "mix": "arithmetic",
        "confidence": "margin",
        "threshold": 1.0,
        "max_words": 1,
        "max_word_tokens": 1,
        "branches": 10,
        "scaling": "top_k",
        "word_end_mass": False,
    },
}
"""What each preset sets. An argument given beside the preset wins over it."""


class _Frozen(BaseModel):
    """A frozen model whose errors are ours: unknown names get the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(type(self), error) from error


def _config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    # An unknown name first: that it was meant for a missing one is the likely mistake.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place = ".".join(str(part) for part in first["loc"])
    if isinstance(inner := first.get("ctx", {}).get("error"), ConfigError):
        return inner
    if first["type"] == "extra_forbidden":
        return UnknownArgumentError(str(first["loc"][-1]), _fields_at(model, first["loc"][:-1]))
    given = first.get("input")
    shown = "" if not place or place.endswith("api_key") else f" (got {given!r:.80})"
    return InvalidArgumentError(f"{place or model.__name__}: {first['msg']}{shown}")


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the (nested) model that ``loc`` leads to."""
    nested: dict[str, type[BaseModel]] = {
        "members": MemberConfig,
        "decoding": DecodingConfig,
        "remote": RemoteConfig,
    }
    for part in loc:
        model = nested.get(str(part), model)
    return list(model.model_fields)


class DecodingConfig(_Frozen):
    """How an ensemble decodes. Every field can also be given to a single call, for that call only.

    Parameters
    ----------
    preset
        Sets the method's fields below it (up to ``word_end_mass``) at once; fields given beside it win.
        ``default``, ``paper`` (the published method) or ``unite`` (token by token, from the idea of UniTE).
    gate
        ``never``: every round is fused. ``any_certain``: while some member is certain, it writes alone.
    catch_up
        With a gate, how the others follow: ``eager`` (each round, so the most confident leads) or ``lazy``
        (not before they are needed, so a leader leads until it is uncertain).
    confidence
        Of a next-token distribution, in [0, 1]: ``margin`` p1 - p2, ``entropy`` 1 - H/log V, ``max_prob`` p1.
    threshold
        A member whose confidence is at or above it is certain.
    max_words, max_word_tokens
        Most words in a span; most tokens in a word (a longer one is split, nothing is lost).
    branches
        Candidates of an uncertain member.
    scaling, scaling_temperature, top_p
        How the branches are picked (see `adafuse_engine.scaling`).
    fusion, mix
        How scores become a winner (see `adafuse_engine.fusion`). ``mix="auto"`` is the rule's own form.
    word_end_mass
        For ``word_posterior``: count the probability that the word ends where it does.
    adaptive_weights
        How strongly weights follow each member's recent agreement with what was committed; 0, the default, leaves
        them as they are (see `adafuse_engine.adaptive`). Not measured to be better.
    temperature, seed
        0 takes the best candidate; above 0 the winner is drawn from softmax(score / temperature). A seed
        makes draws repeatable; without one each request draws its own (it stands in the trace).
    drafting, early_decisions
        Ways to save work that change no answer: members check each other's candidates before they write their
        own; branches that cannot win any more are left unwritten.
    max_tokens, stop
        Most tokens to write, counted by the first member; strings that end the text and are left out of it.
    grammar
        What the answer must be: a grammar in llguidance's dialect of Lark. What cannot go on to a text of it is
        left out before anything is scored; what it forces is written without asking the members. Near
        ``max_tokens`` what is open is ended as shortly as it can be, so that JSON is whole; the finish reason is
        ``length`` all the same.
        `adafuse_engine.chat` makes grammars for JSON schemas and tool calls.
    on_member_failure
        ``error``: a member that fails ends the request. ``continue``: the others go on without it, from what was
        committed; the trace's ``failures`` say so. A request whose members have all failed ends with the error.
    deadline_s, words_per_second, max_forward_passes
        Service levels, none by default. The text is to be written to its end within so many seconds of the start
        of the request (waiting for a place and the prefill included); at so many words a second, counted from
        the end of the prefill; with so many forwards of all members together, the prefill's among them. To keep
        them the engine fuses less: it lowers the threshold, then the branches, and at last lets one member
        write alone, greedily (see `adafuse_engine.service`; the trace tells). A request is never failed for
        being late: it goes on in the cheapest mode to the end of its text. The budget of forwards is never
        passed: when it is used up the text ends with finish reason ``length``, for nothing can be written
        without a forward, and all that was committed stays. A prompt whose prefill takes all of it gives an
        empty text.
    """

    preset: PresetName = "default"
    gate: Gate = "never"
    catch_up: CatchUp = "eager"
    confidence: ConfidenceKind = "margin"
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.7
    max_words: Annotated[int, Field(ge=1, le=64)] = 3
    max_word_tokens: Annotated[int, Field(ge=1, le=256)] = 16
    branches: Annotated[int, Field(ge=1, le=64)] = 3
    scaling: Scaling = "top_k"
    scaling_temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    fusion: FusionRule = "word_posterior"
    mix: Mix = "geometric"
    word_end_mass: bool = True
    adaptive_weights: Annotated[float, Field(ge=0.0, le=8.0)] = 0.0
    drafting: bool = True
    early_decisions: bool = True
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    seed: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 256
    stop: tuple[str, ...] = ()
    grammar: Annotated[str, Field(min_length=1)] | None = None
    on_member_failure: Literal["error", "continue"] = "error"
    deadline_s: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    words_per_second: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    max_forward_passes: Annotated[int, Field(gt=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        preset = PRESETS.get(str(data.get("preset", "default")), {})
        return {**preset, **data}

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        stops = (value,) if isinstance(value, str) else value
        if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
            raise InvalidArgumentError(
                f"stop must be a string or a list of strings, none of them empty (got {value!r:.80})"
            )
        return tuple(dict.fromkeys(check_text(stop, "stop") for stop in stops))

    @property
    def counts_word_ends(self) -> bool:
        """Whether scores take in the probability that words end where they do."""
        return self.word_end_mass and self.fusion == "word_posterior"

    def override(self, **options: Any) -> DecodingConfig:
        """These settings with ``options`` changed. A ``preset`` among them replaces the method's fields.

        Raises `UnknownArgumentError` or `InvalidArgumentError`.
        """
        if not options:
            return self
        for name in options:
            if name not in type(self).model_fields:
                raise UnknownArgumentError(name, type(self).model_fields)
        kept = self.model_dump()
        if "preset" in options:
            kept = {k: v for k, v in kept.items() if k not in PRESETS["default"]}
        return DecodingConfig(**{**kept, **options})


class RemoteConfig(_Frozen):
    """How a remote member is reached.

    Parameters
    ----------
    api_key, api_key_env
        Sent as a bearer token; the name of an environment variable that holds it. In files use the second: a key
        is never written to one.
    timeout_s
        Most seconds that one question to the server may take, retries included.
    retries
        Of questions that failed on the way or got 429, 502, 503 or 504; nothing that a member asks changes the
        server's state. They wait a random time that doubles, or as long as the server says.
    verify
        Check TLS certificates; or the path of a CA bundle.
    top_logprobs
        Most probable tokens to ask for at each place; by default what the dialect's servers allow unasked
        (20, llama.cpp 128). More make the mass that ends a word more exact.
    read_ahead
        Tokens that the server writes greedily with each question: they are what will most likely be asked next.
    propose_only
        Let the member propose and not score: for servers that cannot tell the probability of a given token.
    """

    api_key: SecretStr | None = None
    api_key_env: str | None = None
    timeout_s: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 60.0
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    verify: bool | str = True
    top_logprobs: Annotated[int, Field(ge=2, le=1024)] | None = None
    read_ahead: Annotated[int, Field(ge=1, le=64)] = 4
    propose_only: bool = False


class MemberConfig(_Frozen):
    """One member of the ensemble.

    Parameters
    ----------
    model
        A Hugging Face id or local folder, a path to a ``.gguf`` file, ``bundled:NAME``, or for a remote member
        ``openai+http://host:port/v1#model`` (``openai+https`` for TLS).
    kind
        ``local`` or ``remote``; by default what ``model`` looks like.
    dialect
        How a remote server is asked for scores: ``vllm``, ``sglang``, ``llamacpp``; ``auto`` finds out.
    remote
        How it is reached (see `RemoteConfig`).
    backend
        What runs a local model: ``transformers``, or ``llamacpp`` for ``.gguf`` files and packaged models,
        quantised as they are (extra ``llamacpp``).
    placement
        ``here``, or ``ray``: in an actor on a Ray cluster (extra ``ray``), which loads the weights where it runs.
    num_gpus, num_cpus
        Of a Ray actor, as Ray counts them.
    name
        How usage, traces and per-member prompts call it; by default the last part of ``model``.
    weight
        Its share of the vote, relative to the other members'.
    device, device_map, dtype
        Passed to transformers. ``dtype=None`` is float32 on a CPU and bfloat16 on an accelerator.
    quantization
        Keyword arguments for a transformers quantisation config, with its ``quant_method``. For weights in 8 bits:
        ``{"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}``, or ``{"quant_method":
        "bitsandbytes", "load_in_8bit": True}``; the package of that name has to be installed.
    model_kwargs
        Anything else for ``from_pretrained``.
    revision
        Of a hub model.
    tokenizer
        Another place to take the tokenizer from; of a remote member by default what its server says it runs.
    chat_template
        A Jinja template in place of the tokenizer's own.
    context_window
        Tokens the member may see, if other than what its config says.
    compile
        Run the model through ``torch.compile`` with dynamic shapes. Off, for it has not been measured on a GPU
        yet; on a CPU it spends minutes compiling.
    trust_remote_code
        Run code that comes with a model. Off, and best left so.
    """

    model: Annotated[str, Field(min_length=1)]
    kind: Literal["auto", "local", "remote"] = "auto"
    dialect: Literal["auto", "vllm", "sglang", "llamacpp"] = "auto"
    remote: RemoteConfig = Field(default_factory=RemoteConfig)
    backend: Literal["transformers", "llamacpp"] = "transformers"
    placement: Literal["here", "ray"] = "here"
    num_gpus: Annotated[float, Field(ge=0.0)] = 0.0
    num_cpus: Annotated[float, Field(ge=0.0)] = 1.0
    name: str | None = None
    weight: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    quantization: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    context_window: Annotated[int, Field(ge=8)] | None = None
    compile: bool = False
    trust_remote_code: bool = False

    @property
    def label(self) -> str:
        """``name``, or one made from the last part of ``model``."""
        if self.name:
            return self.name
        last = re.split(r"[/\\:#]", self.model.rstrip("/\\"))[-1]
        return last.removesuffix(".gguf") or self.model

    @property
    def is_remote(self) -> bool:
        """Whether a server holds it."""
        return self.kind == "remote" or (self.kind == "auto" and REMOTE.match(self.model) is not None)

    def weights_key(self) -> tuple[str, ...]:
        """Equal for members that can share one copy of the weights."""
        names = ("model", "device", "device_map", "dtype", "quantization", "model_kwargs", "revision")
        return tuple(f"{n}={getattr(self, n)!r}" for n in (*names, "tokenizer", "compile", "trust_remote_code"))


class EngineConfig(_Frozen):
    """An ensemble: its members, how it decodes, how much it holds at once.

    Parameters
    ----------
    members
        At least one; a plain string is a member by that model name. Names must differ.
    decoding
        The settings that calls start from.
    max_concurrency
        Requests that run at once; more wait in arrival order.
    prefix_slots
        Prompts (with their answers) that each model keeps in its KV cache after their requests, so that a
        later prompt with the same beginning (few-shot examples, a retrieved context, a chat's history) need
        not be computed from the start. The least recently used goes first; 0 keeps none.
    kv_max_bytes
        Most memory that each local model may use for keys and values. Requests that would take it beyond wait
        in arrival order; one that can never fit is an error. By default there is no limit.
    prepare_grammars
        Make what tool calls, schemas and grammars need while the models are loaded: up to two seconds for a model
        of many tokens. Otherwise it is made for the first of them, and the whole process stands still as long.
    progress
        Show loading and long prefills: a bar in a terminal, log lines elsewhere.
    """

    members: tuple[MemberConfig, ...]
    decoding: DecodingConfig = Field(default_factory=DecodingConfig)
    max_concurrency: Annotated[int, Field(ge=1)] = 8
    prefix_slots: Annotated[int, Field(ge=0)] = 4
    kv_max_bytes: Annotated[int, Field(ge=1)] | None = None
    prepare_grammars: bool = True
    progress: bool = True

    def identity(self) -> tuple[str, ...]:
        """Equal for configurations that one engine can serve: the same members, held the same way."""
        secrets = [m.remote.api_key for m in self.members]
        dump = self.model_dump(exclude={"decoding", "prepare_grammars", "progress"})
        return (repr(dump), *(s.get_secret_value() if s else "" for s in secrets))

    @field_validator("members", mode="before")
    @classmethod
    def _accept_names(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [{"model": m} if isinstance(m, str) else m for m in value]
        return value

    @model_validator(mode="after")
    def _check_members(self) -> EngineConfig:
        check_ensemble([m.label for m in self.members], [m.weight for m in self.members])
        return self


class ServerConfig(_Frozen):
    """How `adafuse serve` answers over HTTP.

    Parameters
    ----------
    host, port
        Where it listens. The default is this machine alone.
    model_name
        What the ensemble is called in requests. Each member can be asked alone by its own name.
    api_key, api_key_env
        What clients must send as a bearer token; the name of an environment variable that holds it.
    allowed_hosts
        Names that a request's ``Host`` may have. By default any; on loopback only this machine's own, so that no
        web page can reach the server through a name of its own.
    max_body_bytes
        Largest request taken.
    max_queue
        Requests that may wait beside those that run (``max_concurrency``); more get 429.
    retry_after_s
        What those are told to wait.
    drain_s
        Seconds that running requests have to end after the server was asked to stop.
    tool_form
        How members are shown tools and write calls (see `adafuse_engine.chat`).
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    model_name: Annotated[str, Field(min_length=1)] = "adafuse"
    api_key: SecretStr | None = None
    api_key_env: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4_000_000
    max_queue: Annotated[int, Field(ge=0)] = 64
    retry_after_s: Annotated[int, Field(ge=1)] = 2
    drain_s: Annotated[int, Field(ge=0)] = 30
    tool_form: str = "json_tags"


def check_ensemble(names: list[str], weights: list[float]) -> None:
    """Raise `InvalidArgumentError` unless there are members, under different names, with usable weights."""
    if not names:
        raise InvalidArgumentError("members: an engine needs at least one member, e.g. members=['gpt2']")
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(
                f"members: two members are called {name!r}; give each a name of its own, "
                "e.g. MemberConfig(model=..., name='second')"
            )
    if any(not w >= 0 or w == float("inf") for w in weights):
        raise InvalidArgumentError(f"members: weights must be finite and not negative (got {weights})")
    if not any(weights):
        raise InvalidArgumentError("members: all weights are zero; give at least one member a positive weight")


def member_configs(models: Sequence[str], weights: Sequence[float]) -> tuple[MemberConfig, ...]:
    """Members as the command line names them, with a weight each or none at all."""
    if weights and len(weights) != len(models):
        raise InvalidArgumentError(
            f"--weight: {len(weights)} weights for {len(models)} models; give one per model, in their order"
        )
    shares = weights or [1.0] * len(models)
    return tuple(MemberConfig(model=m, weight=w) for m, w in zip(models, shares, strict=True))
