"""MemberConfig -> a transformers model and its tokenizer, from wherever its name leads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from adafuse_engine import bundled
from adafuse_engine.config import MemberConfig
from adafuse_engine.errors import (
    AdaFuseError,
    InvalidArgumentError,
    LoadError,
    ModelFormatError,
    ModelNotFoundError,
)
from adafuse_engine.members.local.exclusive import exclusive
from adafuse_engine.members.local.gguf import converted
from adafuse_engine.progress import track

__all__ = ["LoadedModel", "device_of", "dtype_of", "load", "mapped", "source_of"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and where they came from (a folder or a hub id)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str


def load(config: MemberConfig, *, progress: bool = True) -> LoadedModel:
    """Load a member's model for inference.

    Raises `ModelNotFoundError`, `ModelFormatError`, `FetchError` or `LoadError`; exceptions of transformers
    are their ``__cause__``.
    """
    arguments = _arguments(config)
    source = source_of(config.model, progress=progress)
    tokenizer_source = source_of(config.tokenizer, progress=progress) if config.tokenizer else source
    # In a terminal transformers shows bars of its own, downloads from the hub included.
    bars = progress and sys.stderr.isatty()
    with track(f"{config.label}: loading", 2, enabled=progress and not bars) as advance, exclusive(bars=bars):
        with mapped(config.tokenizer or config.model, tokenizer_source):
            tokenizer = AutoTokenizer.from_pretrained(
                tokenizer_source,
                revision=None if config.tokenizer else config.revision,
                trust_remote_code=config.trust_remote_code,
            )
        advance(1)
        with mapped(config.model, source):
            model, report = AutoModelForCausalLM.from_pretrained(source, **arguments, output_loading_info=True)
        advance(1)
    if missing := sorted(report["missing_keys"]):
        # transformers would make them up.
        raise ModelFormatError(
            f"{config.model} lacks {len(missing)} of the weights of {type(model).__name__}, e.g. {missing[0]}; "
            "it is incomplete or no causal language model"
        )
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, source)


def source_of(name: str, *, progress: bool = True) -> str:
    """The folder or hub id that a model's name stands for; fetches and converts where that is needed.

    Raises `ModelNotFoundError` for a path that does not exist, `ModelFormatError` for pickles.
    """
    if name.startswith(bundled.PREFIX):
        return str(converted(bundled.fetch(name, progress=progress), progress=progress))
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelNotFoundError(f"there is no file {name}; check the path")
        return str(converted(path, progress=progress))
    if path.is_dir():
        _refuse_pickles(path)
        return str(path)
    if path.is_file():
        raise ModelFormatError(f"{name} is a file, but no .gguf; give the folder that holds the model")
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name:
        raise ModelNotFoundError(f"there is no folder {name}; check the path")
    return name


def device_of(config: MemberConfig) -> str:
    """The device of a member that has no ``device_map``."""
    return config.device or ("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(config: MemberConfig) -> torch.dtype:
    """The type that a member's weights are loaded in."""
    places = config.device_map if config.device_map is not None else device_of(config)
    on_cpu = set(places.values() if isinstance(places, dict) else [places]) <= {"cpu", "disk"}
    return DTYPES[config.dtype or ("float32" if on_cpu else "bfloat16")]


def _arguments(config: MemberConfig) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``."""
    if not config.model_kwargs.get("use_safetensors", True):
        raise InvalidArgumentError("model_kwargs: use_safetensors stays True; pickled weights are refused")
    device = device_of(config)
    arguments: dict[str, Any] = {
        "dtype": dtype_of(config),
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "use_safetensors": True,
    }
    if config.device_map is not None:
        arguments["device_map"] = config.device_map
    elif device != "cpu" or config.quantization:
        arguments["device_map"] = {"": device}
    if config.quantization:
        arguments["quantization_config"] = _quantization(config.quantization)
    return {**arguments, **config.model_kwargs}


def _quantization(options: dict[str, Any]) -> Any:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KINDS

    options = dict(options)
    method = options.pop("quant_method", None)
    if method == "bitsandbytes":
        method = "bitsandbytes_8bit" if options.get("load_in_8bit") else "bitsandbytes_4bit"
    if method not in KINDS:
        raise InvalidArgumentError(f"quantization: quant_method must be one of {', '.join(KINDS)} (got {method!r})")
    if method == "torchao" and isinstance(options.get("quant_type"), str):
        options["quant_type"] = _torchao_kind(options["quant_type"])
    try:
        return KINDS[method](**options)
    except TypeError as error:
        raise InvalidArgumentError(f"quantization: {error}") from error


def _torchao_kind(name: str) -> Any:
    """Torchao wants an object, configuration files have names: of the class, made with its defaults."""
    try:
        import torchao.quantization as kinds
    except ImportError as error:
        raise LoadError("quantization: torchao is not installed; run: pip install torchao") from error
    kind = getattr(kinds, name, None) if name.endswith("Config") else None
    if not isinstance(kind, type):
        known = ", ".join(sorted(n for n in vars(kinds) if n.endswith("WeightOnlyConfig")))
        raise InvalidArgumentError(f"quantization: quant_type must be a class of torchao.quantization: {known}")
    return kind()


def _refuse_pickles(folder: Path) -> None:
    names = {p.name for p in folder.iterdir()}
    if any(n.endswith(".safetensors") for n in names):
        return
    if pickles := sorted(n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))):
        raise ModelFormatError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when they are loaded; "
            "convert them to safetensors first"
        )


@contextmanager
def mapped(name: str, source: str) -> Iterator[None]:
    """Exceptions of transformers and the hub as ours, each with what to do."""
    try:
        yield
    except AdaFuseError:
        raise
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{name} does not fit into memory; load it with dtype='bfloat16', a quantization, or on another device"
        ) from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        if "safetensors" in text and "does not appear to have" in text:
            raise ModelFormatError(
                f"{name} has no safetensors weights; pickled ones are refused, convert them first ({text})"
            ) from error
        if "trust_remote_code" in str(error):
            raise LoadError(
                f"{name} comes with code of its own, which is not run unless asked for: read it, then set "
                "MemberConfig(trust_remote_code=True), or choose a model that transformers knows by itself"
            ) from error
        if isinstance(error, SafetensorError) or (
            os.path.isdir(source) and isinstance(error, OSError | ValueError)
        ):
            raise ModelFormatError(
                f"{name} could not be read: {text} -- the folder needs config.json, tokenizer.json and whole "
                "*.safetensors files, as save_pretrained writes them"
            ) from error
        if isinstance(error, OSError | HFValidationError):
            raise ModelNotFoundError(
                f"{name} could not be loaded: {text} -- check the name; for a hub model also the network, "
                "HF_TOKEN for gated ones, and that HF_HUB_OFFLINE is not set before its first download"
            ) from error
        raise LoadError(f"{name} could not be loaded: {type(error).__name__}: {text}") from error
