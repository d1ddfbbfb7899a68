"""Tiny random models with small real tokenizers, made in milliseconds."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from adafuse_engine import MemberConfig
from adafuse_engine.members.local.member import LocalMember, LocalModel

TEXT = [
    "The ferry leaves the harbour at seven in the morning and comes back at nine in the evening.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "What is the capital of France? The capital of France is Paris, on the Seine.",
    "One, two, three, four; five: six. Seven! Eight? 'Nine' and \"ten\" (eleven) [twelve]. 1234567890",
    "\tTabs\tand  double  spaces\n\n\nand newlines\n",
    "你好,世界。今天天气很好。 Café naïve 🎉",
] * 3


@functools.cache
def byte_level(size: int = 420) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2 and Llama 3 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|eos|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>")


@functools.cache
def sentencepiece(size: int = 460) -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback and a BOS, as Llama 2 and Gemma have it."""
    spaced = normalizers.Replace(" ", "▁")
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = spaced
    trained.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=size - 260, special_tokens=["<unk>"], show_progress=False)
    )
    import json

    spec = json.loads(trained.to_str())["model"]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += [p for p in sorted(spec["vocab"], key=spec["vocab"].get) if p != "<unk>"]
    merges = [tuple(m) for m in spec["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = spaced
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>", unk_token="<unk>"
    )


def _make(cls: Any, config: Any, seed: int, sharp: float) -> Any:
    torch.manual_seed(seed)
    model = cls(config).eval().requires_grad_(False)
    # Random heads are nearly flat; sharpen them, so that models are certain at times and ties do not matter.
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        head.weight.data.mul_(sharp)
    model.generation_config.eos_token_id = config.eos_token_id
    return model


def llama(seed: int = 0, sharp: float = 12.0, tokenizer: Any = None) -> Any:
    """Byte-level tokenizer, full attention, grouped heads."""
    config = LlamaConfig(
        vocab_size=len(tokenizer or byte_level()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=[0, 1],
        bos_token_id=None,
        pad_token_id=2,
    )
    return _make(LlamaForCausalLM, config, seed, sharp)


def gemma(seed: int = 0, sharp: float = 12.0, window: int = 8) -> Any:
    """SentencePiece tokenizer, sliding and full layers with a window shorter than most prompts."""
    config = Gemma3TextConfig(
        vocab_size=len(sentencepiece()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    return _make(Gemma3ForCausalLM, config, seed, sharp)


def mistral(seed: int = 0, sharp: float = 12.0, window: int = 8) -> Any:
    """Byte-level tokenizer, every layer sliding."""
    config = MistralConfig(
        vocab_size=len(byte_level()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        max_position_embeddings=2048,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=None,
    )
    return _make(MistralForCausalLM, config, seed, sharp)


def gpt2(seed: int = 0, sharp: float = 12.0) -> Any:
    """Byte-level tokenizer, learned positions, a short window."""
    config = GPT2Config(
        vocab_size=len(byte_level()),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=0,
        tie_word_embeddings=False,
    )
    return _make(GPT2LMHeadModel, config, seed, sharp)


def mamba(seed: int = 0, sharp: float = 12.0) -> Any:
    """A state-space model: no attention at all."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=len(byte_level()),
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=0,
        tie_word_embeddings=False,
    )
    return _make(MambaForCausalLM, config, seed, sharp)


MAKERS = {"llama": llama, "gemma": gemma, "mistral": mistral, "gpt2": gpt2, "mamba": mamba}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer that goes with a kind of model."""
    return sentencepiece() if kind == "gemma" else byte_level()


def member(kind: str = "llama", name: str | None = None, seed: int = 0, **options: Any) -> LocalMember:
    """A member on a tiny model of its own."""
    return LocalMember(
        MemberConfig(model=kind, name=name or f"{kind}{seed}"),
        local_model(kind, seed, **options),
        progress=False,
    )


def local_model(
    kind: str = "llama", seed: int = 0, config: MemberConfig | None = None, **options: Any
) -> LocalModel:
    """Weights that several members may share."""
    loaded = SimpleNamespace(
        model=MAKERS[kind](seed, **options), tokenizer=tokenizer_of(kind), source=f"tiny:{kind}"
    )
    return LocalModel(config or MemberConfig(model=kind), loaded)


def save(kind: str, folder: Any, seed: int = 0) -> Any:
    """Write a tiny model and its tokenizer to a folder, as a hub model lies on disk."""
    MAKERS[kind](seed).save_pretrained(folder)
    tokenizer_of(kind).save_pretrained(folder)
    return folder


__all__ = ["MAKERS", "AutoModelForCausalLM", "byte_level", "local_model", "member", "save", "sentencepiece"]
