"""What the adapters have in common: the fields, the engine behind them, and what a call decodes with."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from adafuse_engine import (
    Chunk,
    DecodingConfig,
    Engine,
    EngineConfig,
    InvalidArgumentError,
    MemberConfig,
    MissingExtraError,
    UnknownArgumentError,
    read_config,
)
from adafuse_engine.types import Prompts

__all__ = ["EnsembleFields", "astream", "require", "stream"]

_COMMON = ("preset", "threshold", "max_tokens", "temperature", "seed", "stop")


def require(module: str, package: str, *, extra: str) -> None:
    """Raise `MissingExtraError` unless ``module`` can be imported."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A framework that is there but lacks something of its own has its own message.
        if error.name is not None and module.startswith(error.name):
            raise MissingExtraError(package, extra) from error
        raise


class EnsembleFields(BaseModel):
    """The fields by which every adapter names its ensemble and how it decodes.

    The usual settings are fields of their own; every other one of `adafuse_engine.DecodingConfig` may be
    given to the constructor by name just the same, and is kept in ``decoding``. None means "not set here".
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    models: list[str | MemberConfig] = Field(
        default_factory=list,
        description="The members, by model name or as `MemberConfig`; loaded at first use, once per process.",
    )
    engine: SkipJsonSchema[Engine | None] = Field(
        default=None, exclude=True, repr=False, description="A ready engine, in place of `models`."
    )
    preset: str | None = Field(default=None, description="`default` or `paper`: the method as a whole.")
    threshold: float | None = Field(default=None, description="Confidence at or above which a member is certain.")
    max_tokens: int | None = Field(default=None, description="Most tokens to write, counted by the first member.")
    temperature: float | None = Field(
        default=None, description="0 takes the best candidate, above 0 draws among them."
    )
    seed: int | None = Field(default=None, description="Makes draws repeatable.")
    stop: list[str] | None = Field(default=None, description="Strings that end the text and are left out of it.")
    decoding: dict[str, Any] = Field(
        default_factory=dict, description="Any other field of `adafuse_engine.DecodingConfig`, by name."
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict, description="Fields of `adafuse_engine.EngineConfig` beside members and decoding."
    )

    def __init__(self, **data: Any) -> None:
        # Here and not in a validator, so that errors are raised as themselves and not inside pydantic's.
        super().__init__(**_checked(type(self), data))

    @classmethod
    def from_config(cls, path: str | Path, **options: Any) -> Self:
        """An LLM from a file that `adafuse calibrate` or `adafuse_engine.write_config` wrote, or a hand.

        ``options``: anything the constructor takes; they win over the file. Raises `adafuse_engine.ConfigError`.
        """
        config = read_config(path)
        decoding = config.decoding.model_dump(exclude_unset=True)
        decoding.update({k: v for k, v in (options.pop("decoding", None) or {}).items()})
        engine = config.model_dump(exclude_unset=True, exclude={"members", "decoding"})
        given = {"models": list(config.members), "decoding": decoding, "engine_options": engine}
        return cls(**{**given, **options})

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # What the frameworks log and trace: no engine, and nothing that `model_kwargs` may hold.
        return [("model_name", self.model_name), *self._given().items()]

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # a copy shares the engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None:
            raise InvalidArgumentError(
                "an engine cannot be pickled; make the LLM from models=[...], then it can, and loads them "
                "again where it is unpickled"
            )
        return super().__getstate__()

    @property
    def model_name(self) -> str:
        """The members' names, joined by ``+``. Known before anything is loaded."""
        if self.engine is not None:
            return self.engine.model_name
        return "+".join(member.label for member in self._members())

    def _members(self) -> tuple[MemberConfig, ...]:
        """What the ensemble is made of; empty for an engine with ready-made members."""
        if self.engine is not None:
            return self.engine.config.members if self.engine.config is not None else ()
        return _members(self.models)

    def _ensemble(self) -> Engine:
        """The given engine, or the one that all adapters with these models share; loads them if need be."""
        if self.engine is not None:
            return self.engine
        return Engine.shared(EngineConfig(members=self._members(), **self.engine_options))

    async def _aensemble(self) -> Engine:
        """`_ensemble` that leaves the event loop free while models are loaded."""
        return self.engine if self.engine is not None else await asyncio.to_thread(self._ensemble)

    def _given(self) -> dict[str, Any]:
        """The settings that were given to this LLM."""
        common = {name: value for name in _COMMON if (value := getattr(self, name)) is not None}
        return {**self.decoding, **common}

    def _settings(self, stop: Sequence[str] | str | None = None, **options: Any) -> DecodingConfig:
        """What a call decodes with: the engine's defaults, then this LLM's settings, then the call's own."""
        base = self.engine.decoding if self.engine is not None else DecodingConfig()
        if stop is not None:
            options["stop"] = stop
        return base.override(**self._given()).override(**options)

    def _with_settings(self, settings: DecodingConfig) -> Self:
        """A copy, on the same engine, that has ``settings`` as its own."""
        return self.model_copy(update={**dict.fromkeys(_COMMON), "decoding": settings.model_dump()})


def _checked(cls: type[EnsembleFields], data: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments, checked, with decoding settings and models in their normal form."""
    fields = {*cls.model_fields, *(f.alias for f in cls.model_fields.values() if f.alias)}
    settings = DecodingConfig.model_fields
    for name in data:
        if name not in fields and name not in settings:
            raise UnknownArgumentError(name, {*fields, *settings})
    own = {name: value for name, value in data.items() if name in fields}
    decoding = own.get("decoding") or {}
    if isinstance(decoding, DecodingConfig):
        decoding = decoding.model_dump()
    if not isinstance(decoding, Mapping):
        raise InvalidArgumentError(f"decoding: a dict of settings or a DecodingConfig (got {decoding!r:.80})")
    own["decoding"] = {**decoding, **{name: data[name] for name in data if name not in fields}}

    engine, models = own.get("engine"), own.get("models")
    if engine is not None and not isinstance(engine, Engine):
        raise InvalidArgumentError(f"engine: an adafuse_engine.Engine (got {engine!r:.80})")
    if engine is not None and models:
        raise InvalidArgumentError("give either models or an engine, not both")
    if engine is None:
        own["models"] = _normal(models, own.get("engine_options") or {})

    given = {**own["decoding"], **{n: own[n] for n in _COMMON if own.get(n) is not None}}
    checked = (engine.decoding if engine is not None else DecodingConfig()).override(**given)
    if own.get("stop") is not None:
        own["stop"] = list(checked.stop)
    return own


def _normal(models: Any, options: Mapping[str, Any]) -> list[str | MemberConfig]:
    """Names stay names, dicts become `MemberConfig`."""
    if not isinstance(models, list | tuple) or not models:
        raise InvalidArgumentError(
            f"give models=[...] (model names or MemberConfig) or engine=... (got models={models!r:.80})"
        )
    normal = [MemberConfig(**model) if isinstance(model, Mapping) else model for model in models]
    for model in normal:
        if not isinstance(model, str | MemberConfig):
            raise InvalidArgumentError(f"models: {model!r:.80} is neither a model name nor a MemberConfig")
    # Members are checked together as well: no two may have one name.
    EngineConfig(members=_members(normal), **options)
    return normal


def _members(models: Sequence[str | MemberConfig]) -> tuple[MemberConfig, ...]:
    return tuple(MemberConfig(model=m) if isinstance(m, str) else m for m in models)


def stream(engine: Engine, prompt: Prompts, settings: DecodingConfig) -> closing[Generator[Chunk, None, None]]:
    """The engine's stream, closed when the ``with`` block ends."""
    return closing(engine.stream(prompt, **settings.model_dump()))


def astream(engine: Engine, prompt: Prompts, settings: DecodingConfig) -> aclosing[AsyncGenerator[Chunk, None]]:
    """`stream` for async callers."""
    return aclosing(engine.astream(prompt, **settings.model_dump()))
