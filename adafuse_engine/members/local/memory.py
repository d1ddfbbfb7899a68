"""What members will need of memory, told before their weights are loaded; what running out of it looks like."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig

from adafuse_engine.config import EngineConfig, MemberConfig
from adafuse_engine.errors import InsufficientMemoryError
from adafuse_engine.members.local.loading import device_of, dtype_of, source_of

__all__ = ["Estimate", "check_memory", "estimate", "free_bytes", "is_out_of_memory"]

log = logging.getLogger("adafuse_engine")

USUAL_CONTEXT = 4096
"""Tokens that a request is taken to need at most, where the model allows more."""

# Of these the loaded type or place of the weights may differ from what the member's other settings say.
_UNSURE = {"device_map", "dtype", "load_in_4bit", "load_in_8bit", "quantization_config", "subfolder", "torch_dtype"}

_ALLOCATION = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a member's weights will take, and its KV at most; ``sure``: enough so to refuse the load."""

    name: str
    device: str
    weights: int
    kv: int
    sure: bool


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _ALLOCATION)


def check_memory(config: EngineConfig) -> None:
    """Log what each distinct model of an ensemble will need, and what is free.

    Models whose files cannot be looked at before they are downloaded are left out.

    Raises `InsufficientMemoryError` where weights do not fit; only warns where KV may not. Also what `source_of`
    raises.
    """
    views: dict[tuple[str, ...], list[MemberConfig]] = defaultdict(list)
    for member in config.members:
        views[member.weights_key()].append(member)
    places: dict[str, list[Estimate]] = defaultdict(list)
    for members in views.values():
        found = estimate(members[0], config, len(members))
        if found is None:
            log.debug("%s: how much memory it will need is not known before it is loaded", members[0].label)
        else:
            places[found.device].append(found)
    for device, estimates in places.items():
        _check_device(device, estimates)


def _check_device(device: str, estimates: list[Estimate]) -> None:
    free = free_bytes(device)
    for one in estimates:
        shown = "unknown" if free is None else _gb(free)
        log.info(
            "%s: weights %s, KV up to %s, %s free on %s", one.name, _gb(one.weights), _gb(one.kv), shown, device
        )
    if free is None:
        return
    sure = {one.name: one.weights for one in estimates if one.sure}
    if sum(sure.values()) > free:
        raise InsufficientMemoryError(device, sure, free)
    wanted = sum(one.weights + one.kv for one in estimates)
    if wanted > free:
        log.warning(
            "weights and KV may need %s on %s, where %s is free: with many or long requests at once some may fail; "
            "lower max_concurrency, or set kv_max_bytes so that they wait",
            *(_gb(wanted), device, _gb(free)),
        )


def estimate(member: MemberConfig, config: EngineConfig, views: int = 1) -> Estimate | None:
    """What a model will need with ``views`` members on it, or None if that cannot be known."""
    folder = _folder(member, config.progress)
    if folder is None:
        return None
    dtype = dtype_of(member)
    try:
        weights = _weights(folder, dtype.itemsize)
        spec = AutoConfig.from_pretrained(folder, trust_remote_code=member.trust_remote_code)
        per_token = _kv_per_token(spec.get_text_config(), dtype.itemsize)
        window = getattr(spec.get_text_config(), "max_position_embeddings", None)
    except Exception as error:
        # Whatever is wrong with the files, loading them says it better.
        log.debug("%s: %s: %s", member.label, type(error).__name__, error)
        return None
    tokens = min(member.context_window or window or 2048, USUAL_CONTEXT)
    kv = per_token * tokens * config.max_concurrency * views
    if config.kv_max_bytes is not None:
        kv = min(kv, config.kv_max_bytes)
    spread = (
        member.device_map is not None or bool(member.quantization) or not _UNSURE.isdisjoint(member.model_kwargs)
    )
    quantized = getattr(spec, "quantization_config", None) is not None
    return Estimate(member.label, _whole_name(device_of(member)), weights, kv, not spread and not quantized)


def _folder(member: MemberConfig, progress: bool) -> Path | None:
    """The folder with the model's files; None for a hub model that is not in the cache."""
    source = source_of(member.model, progress=progress)
    if Path(source).is_dir():
        return Path(source)
    try:
        found = try_to_load_from_cache(source, "config.json", revision=member.revision)
    except ValueError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _weights(folder: Path, itemsize: int) -> int:
    """Bytes of all tensors, floating ones in the type that they are loaded in. Only the files' headers are read."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        single = folder / "model.safetensors"
        names = [single.name] if single.is_file() else sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise FileNotFoundError(f"no safetensors in {folder}")
    total = 0
    for name in names:
        with (folder / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        for tensor in header.values():
            floating = tensor["dtype"] in ("F64", "F32", "F16", "BF16")
            begin, end = tensor["data_offsets"]
            total += math.prod(tensor["shape"]) * itemsize if floating else end - begin
    return total


def _kv_per_token(spec: Any, itemsize: int) -> int:
    """Bytes of keys and values of one token in all layers."""
    heads = spec.num_attention_heads
    size = getattr(spec, "head_dim", None) or spec.hidden_size // heads
    pairs = getattr(spec, "num_key_value_heads", None) or heads
    return int(2 * spec.num_hidden_layers * pairs * size * itemsize)


def _whole_name(device: str) -> str:
    """``cuda`` is the current one of several, which has a number."""
    if device == "cuda" and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return device


def free_bytes(device: str) -> int | None:
    """What is free on a device; None if that is not known."""
    if device.startswith("cuda") and torch.cuda.is_available():
        try:
            free, _ = torch.cuda.mem_get_info(device)
        except (RuntimeError, AssertionError):
            return None  # there is no such device: loading says so
        return int(free)
    return _free_on_cpu() if device == "cpu" else None


def _free_on_cpu(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What Linux says is available, or what is left of a container's limit if that is less."""
    try:
        facts = _table((proc / "meminfo").read_text())
        free = facts["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return None
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            left = int((groups / limit).read_text()) - int((groups / used).read_text())
            # Pages of files that nobody uses are given up as soon as memory is asked for.
            left += _table((groups / limit).with_name("memory.stat").read_text()).get(cached, 0)
        except (OSError, ValueError):
            continue
        free = min(free, max(0, left))
    return free


def _table(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(number) for name, number, *_ in map(str.split, text.splitlines())}


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
