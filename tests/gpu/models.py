"""Random models of real shapes, made on the device from their configs alone: nothing is downloaded."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adafuse_engine import MemberConfig
from adafuse_engine.members.local.member import LocalMember, LocalModel
from tests.support import tiny

SHAPES = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Those of Llama 3.2 1B and Llama 3.1 8B, and two for machines without a GPU."""


def random_llama(
    shape: str, device: str, dtype: torch.dtype, seed: int = 0, spread: float = 11.0
) -> LlamaForCausalLM:
    """A model with random weights. ``spread``: standard deviation of its logits, about.

    At 11, over the tokens that the small tokenizer has, about half of the next tokens are certain at a threshold
    of 0.7. Ids that no token has pad the vocabulary to Llama's width. It never ends a text.
    """
    large = shape in ("1B", "8B")
    config = LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=8 if large else 2,
        vocab_size=128_256 if large else 512,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=[0, 1],
        pad_token_id=2,
        # In narrow models the usual 0.02 would leave nothing but the last token to tell contexts apart.
        initializer_range=0.02 if large else 0.2,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        head = model.lm_head.weight
        head.normal_(0.0, spread / math.sqrt(config.hidden_size))
        head[: max(config.eos_token_id) + 1] = 0.0
    return model.eval().requires_grad_(False)


def local_model(model: LlamaForCausalLM, label: str) -> LocalModel:
    """It with its slots and worker, as the engine has them."""
    loaded = SimpleNamespace(model=model, tokenizer=tiny.byte_level(), source=label)
    return LocalModel(MemberConfig(model=label), loaded)


def member_of(model: LocalModel, name: str) -> LocalMember:
    """A member of that name on the model."""
    return LocalMember(MemberConfig(model=name, name=name), model, progress=False)
