"""``.gguf`` files: converted once to a folder of safetensors in the cache, and loaded from there.

De-quantising takes most of a minute each time; the converted copy loads in seconds. It holds the same values,
in float32.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from adafuse_engine.cache import build_once, cache_folder, is_whole, sha256_of
from adafuse_engine.errors import LoadError, ModelFormatError, ModelNotFoundError
from adafuse_engine.progress import track

# torch is imported where a file has to be converted: to see that it was takes no second.

__all__ = ["converted", "gguf_tokenizer", "is_converted"]

VERSION = 2

# A file names one end token; models were trained with these as well, and llama.cpp ends a text at any of them.
ENDS = (
    *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>"),
    *("<|end_of_turn|>", "<|return|>", "<turn|>", "</s>"),
)

# In the metadata's list of token types. Where such a token's text is an ordinary one (Gemma's "</s>", for
# text struck through), the type is another.
CONTROL = 3


def converted(path: Path, *, progress: bool = True) -> Path:
    """The folder that holds the converted model.

    Raises `ModelNotFoundError`, or `ModelFormatError` if the file is no readable GGUF.
    """
    folder = cache_folder() / "converted" / _checked_key(path)
    return build_once(folder, lambda scratch: _convert(path, scratch, progress))


def gguf_tokenizer(path: Path) -> Path:
    """The folder that holds the file's tokenizer, and in ``facts.json`` its end tokens, size and context window.

    No weights are read. Raises what `converted` raises.
    """
    folder = cache_folder() / "converted" / f"{_checked_key(path)}-tokenizer"
    return build_once(folder, lambda scratch: _take_tokenizer(path, scratch))


def _checked_key(path: Path) -> str:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelFormatError(f"{path} is no GGUF file (it starts with {magic!r}); fetch or export it again")
        return _key(path)
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}; check the path") from error


def _take_tokenizer(path: Path, scratch: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    from adafuse_engine.members.local.exclusive import exclusive

    with exclusive(bars=False):
        try:
            fields = GGUFReader(str(path)).fields
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
            _save_tokenizer(tokenizer, fields, scratch)
        except Exception as error:
            raise ModelFormatError(
                f"{path}: its tokenizer could not be read: {type(error).__name__}: {str(error)[:300]}; name "
                "another place for it with MemberConfig(tokenizer=...)"
            ) from error
    architecture = _value(fields, "general.architecture")
    known = tokenizer.eos_token_id
    facts = {
        "ends": _ends([] if known is None else [known], fields),
        "size": len(_value(fields, "tokenizer.ggml.tokens")),
        "context_window": _value(fields, f"{architecture}.context_length"),
    }
    (scratch / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def is_converted(path: Path) -> bool:
    """Whether the file was converted before."""
    return path.is_file() and is_whole(cache_folder() / "converted" / _key(path))


def _key(path: Path) -> str:
    """By the file's content. The digest is remembered by path, size and time, for hashing takes a second."""
    stat = path.stat()
    place = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    memo = cache_folder() / "digests" / hashlib.sha256(place.encode()).hexdigest()[:32]
    try:
        digest = memo.read_text()
    except OSError:
        digest = ""
    if len(digest) != 64:
        digest = sha256_of(path)
        with suppress(OSError):  # a cache that may only be read
            memo.parent.mkdir(parents=True, exist_ok=True)
            memo.write_text(digest)
    return f"{path.stem[:80]}-{digest[:16]}-v{VERSION}"


def _convert(path: Path, scratch: Path, progress: bool) -> None:
    import torch
    import transformers
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from adafuse_engine.members.local.exclusive import exclusive

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with track(f"{path.name}: converting, once", 4, enabled=progress) as advance, exclusive(bars=False):
        try:
            fields = GGUFReader(str(path)).fields
            advance(1)
            tokenizer = AutoTokenizer.from_pretrained(**place)
            advance(1)
            if hasattr(transformers, "GgufConfig"):
                # Otherwise newer versions leave the weights packed where the package "kernels" is installed.
                place["quantization_config"] = transformers.GgufConfig(dequantize=True)
            model, report = AutoModelForCausalLM.from_pretrained(
                **place, dtype=torch.float32, output_loading_info=True
            )
            advance(1)
        except Exception as error:
            raise ModelFormatError(
                f"{path} could not be read as GGUF: {type(error).__name__}: {str(error)[:300]}; the file may be "
                "cut short, or its architecture unknown to the installed transformers"
            ) from error
        if missing := sorted(report["missing_keys"]):
            raise ModelFormatError(f"{path} lacks {len(missing)} of the model's weights, e.g. {missing[0]}")
        try:
            _save_tokenizer(tokenizer, fields, scratch)
            _save_model(model, fields, scratch)
        except OSError:
            raise
        except Exception as error:
            raise LoadError(
                f"{path} was read but could not be saved: {type(error).__name__}: {str(error)[:300]}; give the "
                "model's original folder or hub id instead"
            ) from error
        advance(1)


def _save_model(model: Any, fields: Any, scratch: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoConfig, GenerationConfig

    state: dict[str, Any] = {}
    stored: set[tuple[int, ...]] = set()
    for name, tensor in model.state_dict().items():
        # What two names share, such as an embedding that is also the head, is written once.
        storage = (tensor.data_ptr(), *tensor.shape)
        if tensor.numel() == 0 or storage not in stored:
            stored.add(storage)
            state[name] = tensor.contiguous()
    save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.for_model(**{**model.config.to_dict(), "quantization_config": None})
    config.architectures = [type(model).__name__]
    spec = config.to_dict()
    spec.pop("quantization_config", None)
    spec.pop("_name_or_path", None)
    (scratch / "config.json").write_text(json.dumps(spec, indent=1))
    named = model.generation_config.eos_token_id
    GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=_ends([named] if isinstance(named, int) else list(named or []), fields),
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    ).save_pretrained(scratch)


def _ends(known: list[int], fields: Any) -> list[int]:
    """Every end token that is known, that the file names, or that is one by its text."""
    ends = list(known)
    ends += [_value(fields, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    types = _value(fields, "tokenizer.ggml.token_type") or []
    texts = _value(fields, "tokenizer.ggml.tokens") or []
    ends += [
        i for i, (text, kind) in enumerate(zip(texts, types, strict=False)) if kind == CONTROL and text in ENDS
    ]
    return list(dict.fromkeys(int(i) for i in ends if i is not None))


def _save_tokenizer(tokenizer: Any, fields: Any, scratch: Path) -> None:
    """With one BOS before every text, or none, as the file says; without a word, by llama.cpp's rule."""
    from tokenizers import processors

    adds = _value(fields, "tokenizer.ggml.add_bos_token")
    if adds is None:
        adds = _value(fields, "tokenizer.ggml.model") == "llama"
    bos = tokenizer.bos_token_id
    wanted = [bos] if adds and bos is not None else []
    if tokenizer("").input_ids != wanted:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokenizer.bos_token, "$A"] if wanted else ["$A"],
            special_tokens=[(tokenizer.bos_token, bos)] if wanted else [],
        )
    tokenizer.save_pretrained(scratch)


def _value(fields: Any, key: str) -> Any:
    field = fields.get(key)
    return None if field is None else field.contents()
