"""Tiny ``.gguf`` files, as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch

from tests.support.tiny import byte_level, llama, sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(
    path: Path,
    kind: str = "bpe",
    *,
    seed: int = 0,
    tied: bool = False,
    types: dict[int, int] | None = None,
    **metadata: Any,
) -> Any:
    """Write a tiny Llama and give the model it was made from.

    Parameters
    ----------
    kind
        ``bpe`` (byte-level) or ``spm`` (SentencePiece): which tokenizer.
    tied
        Without a head of its own.
    types
        Kinds of tokens by id, where other than what the tokenizer says.
    metadata
        Of the tokenizer, e.g. ``add_bos_token=False``.
    """
    tokenizer = byte_level() if kind == "bpe" else sentencepiece()
    model = llama(seed, tokenizer=tokenizer)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, kind, tokenizer, types or {}, metadata)
    for name, tensor in _tensors(model, tied).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(
    writer: gguf.GGUFWriter, kind: str, tokenizer: Any, changed: dict[int, int], metadata: dict[str, Any]
) -> None:
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids) | {t["id"] for t in spec["added_tokens"] if t["special"]}
    types = [CONTROL if i in special else NORMAL for i in range(len(pieces))]
    writer.add_tokenizer_model("gpt2" if kind == "bpe" else "llama")
    writer.add_tokenizer_pre("default")
    if kind == "bpe":
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    else:
        types = [BYTE if len(p) == 6 and p.startswith("<0x") else t for p, t in zip(pieces, types, strict=True)]
        types[tokenizer.unk_token_id] = UNKNOWN
        writer.add_unk_token_id(tokenizer.unk_token_id)
        writer.add_token_scores([-float(i) for i in range(len(pieces))])
    writer.add_token_list(pieces)
    writer.add_token_types([changed.get(i, t) for i, t in enumerate(types)])
    writer.add_bos_token_id(tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)


def _tensors(model: Any, tied: bool) -> dict[str, torch.Tensor]:
    config = model.config
    tensors = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    if not tied:
        tensors["output.weight"] = model.lm_head.weight
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        block = {
            "attn_norm": layer.input_layernorm.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "attn_q": _interleaved(attention.q_proj.weight, config.num_attention_heads),
            "attn_k": _interleaved(attention.k_proj.weight, config.num_key_value_heads),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        tensors |= {f"blk.{i}.{name}.weight": tensor for name, tensor in block.items()}
    return {name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head in the order that llama.cpp's rotary embedding takes: pairs side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
