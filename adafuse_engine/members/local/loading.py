"""MemberConfig -> a transformers model and its tokenizer, from wherever its name leads."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from adafuse_engine import bundled
from adafuse_engine.config import MemberConfig
from adafuse_engine.errors import (
    AdaFuseError,
    InvalidArgumentError,
    LoadError,
    ModelFormatError,
    ModelNotFoundError,
)
from adafuse_engine.members.local.gguf import converted

__all__ = ["LoadedModel", "load", "source_of"]

log = logging.getLogger("adafuse_engine")

# Loading in transformers goes through process-wide defaults, so one model at a time.
_loading = threading.Lock()

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
    source = source_of(config.model, progress=progress)
    with _loading, _bars(progress), _mapped(config.model):
        tokenizer = AutoTokenizer.from_pretrained(
            config.tokenizer or source,
            revision=None if config.tokenizer else config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        model = AutoModelForCausalLM.from_pretrained(source, **_arguments(config))
        if config.device_map is None and not config.quantization:
            model = model.to(_device(config))
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


def _arguments(config: MemberConfig) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``."""
    device = _device(config)
    dtype = config.dtype or ("float32" if device.startswith("cpu") else "bfloat16")
    arguments: dict[str, Any] = {
        "dtype": DTYPES[dtype],
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "use_safetensors": True,
    }
    if config.device_map is not None:
        arguments["device_map"] = config.device_map
    if config.quantization:
        arguments["quantization_config"] = _quantization(config.quantization)
        arguments.setdefault("device_map", device)
    return {**arguments, **config.model_kwargs}


def _device(config: MemberConfig) -> str:
    return config.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _quantization(options: dict[str, Any]) -> Any:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KINDS

    options = dict(options)
    method = options.pop("quant_method", None)
    if method == "bitsandbytes":
        method = "bitsandbytes_8bit" if options.get("load_in_8bit") else "bitsandbytes_4bit"
    if method not in KINDS:
        raise InvalidArgumentError(f"quantization: quant_method must be one of {', '.join(KINDS)} (got {method!r})")
    try:
        return KINDS[method](**options)
    except TypeError as error:
        raise InvalidArgumentError(f"quantization: {error}") from error


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
def _bars(progress: bool) -> Iterator[None]:
    """Without transformers' own progress bars, unless someone watches."""
    if progress and sys.stderr.isatty():
        yield
        return
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _mapped(name: str) -> Iterator[None]:
    """Exceptions of transformers and the hub as ours, each with what to do."""
    try:
        yield
    except AdaFuseError:
        raise
    except (OSError, HFValidationError) as error:
        text = " ".join(str(error).split())[:300]
        if "safetensors" in text and "does not appear to have" in text:
            raise ModelFormatError(
                f"{name} has no safetensors weights; pickled ones are refused, convert them first ({text})"
            ) from error
        raise ModelNotFoundError(
            f"{name} could not be loaded: {text} -- check the name; for a hub model also the network, "
            "HF_TOKEN for gated ones, and that HF_HUB_OFFLINE is not set before its first download"
        ) from error
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{name} does not fit into memory; load it with dtype='bfloat16', a quantization, or on another device"
        ) from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise LoadError(f"{name} could not be loaded: {type(error).__name__}: {text}") from error
