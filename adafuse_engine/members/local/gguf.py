"""``.gguf`` files: converted once to a folder of safetensors in the cache, and loaded from there.

De-quantising takes most of a minute each time; the converted copy loads in seconds. It holds the same values,
in float32.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from adafuse_engine.cache import build_once, cache_folder, is_whole, sha256_of
from adafuse_engine.errors import AdaFuseError, ModelFormatError
from adafuse_engine.progress import track

__all__ = ["converted", "is_converted"]

VERSION = 1

# A file names one end token; models were trained with these as well, and llama.cpp ends a text at any of them.
ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "</s>")


def converted(path: Path, *, progress: bool = True) -> Path:
    """The folder that holds the converted model.

    Raises `ModelFormatError` if the file is no readable GGUF.
    """
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFormatError(f"{path} is no GGUF file (it starts with {magic!r}); fetch or export it again")
    folder = cache_folder() / "converted" / _key(path)
    return build_once(folder, lambda scratch: _convert(path, scratch, progress))


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
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.write_text(digest)
    return f"{path.stem}-{digest[:16]}-v{VERSION}"


def _convert(path: Path, scratch: Path, progress: bool) -> None:
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with track(f"{path.name}: converting, once", 3, enabled=progress) as advance:
        try:
            tokenizer = AutoTokenizer.from_pretrained(**place)
            advance(1)
            model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
            advance(1)
        except AdaFuseError:
            raise
        except Exception as error:
            raise ModelFormatError(
                f"{path} could not be read as GGUF: {type(error).__name__}: {str(error)[:300]}; the file may be "
                "cut short, or its architecture unknown to the installed transformers"
            ) from error
        _save_tokenizer(tokenizer, path, scratch)
        _save_model(model, tokenizer, scratch)
        advance(1)


def _save_model(model: Any, tokenizer: Any, scratch: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        # The head is the embedding; written once.
        for name in getattr(model, "_tied_weights_keys", None) or ():
            state.pop(name, None)
    save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.for_model(**{**model.config.to_dict(), "quantization_config": None})
    config.architectures = [type(model).__name__]
    spec = config.to_dict()
    spec.pop("quantization_config", None)
    spec.pop("_name_or_path", None)
    (scratch / "config.json").write_text(json.dumps(spec, indent=1))
    vocabulary = tokenizer.get_vocab()
    known = model.generation_config.eos_token_id
    ends = [known] if isinstance(known, int) else list(known or [])
    ends += [vocabulary[name] for name in ENDS if name in vocabulary and vocabulary[name] not in ends]
    generation = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=ends,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    generation.save_pretrained(scratch)


def _save_tokenizer(tokenizer: Any, path: Path, scratch: Path) -> None:
    """With a BOS before every text, or without, as the file says."""
    bos = tokenizer.bos_token_id
    wanted = bos is not None and _adds_bos(path)
    if wanted != (bos is not None and tokenizer("a").input_ids[:1] == [bos]):
        single = f"{tokenizer.bos_token} $A" if wanted else "$A"
        special = [(tokenizer.bos_token, bos)] if wanted else []
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=special
        )
    tokenizer.save_pretrained(scratch)


def _adds_bos(path: Path) -> bool:
    """What the file's metadata says; without a word llama.cpp's rule for the kind of tokenizer."""
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields
    if (said := fields.get("tokenizer.ggml.add_bos_token")) is not None:
        return bool(said.contents())
    kind = fields.get("tokenizer.ggml.model")
    return kind is not None and kind.contents() == "llama"
