"""Token ids <-> bytes, exactly, for byte-level BPE, SentencePiece BPE and Unigram with byte fallback."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from adafuse_engine.errors import TokenizerError
from adafuse_engine.members.guide import Guides
from adafuse_engine.words import starts_with_space

__all__ = ["Vocabulary", "end_tokens"]

# What a tokenizer must give back to the byte: scripts, whitespace of all kinds, code, marks, an end marker as text.
SAMPLES = (
    "The quick (brown) fox: 3,141.59 'jumps' over \"it\"; isn't it?",
    "def f(x):\n\tif x  >=  10:\r\n        return {'a': [1, 2]}\n\n\n",
    "Straße naïve Ελληνικά русский עברית हिन्दी",
    "你好,世界。 こんにちは カタカナ สวัสดีครับ",
    "👩‍👩‍👧 🎉 e\u0301 \u00a0\u2003\u3000 \u200b",
    "</s> <|im_end|> <eos> [INST] <0x0A>",
)


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end token that tokenizer, config and generation config name, together."""
    found: set[int] = set()
    text_config = model.config.get_text_config()
    for source in (tokenizer, model.config, text_config, model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(int(i) for i in found)


class Vocabulary:
    """A tokenizer as bytes: what each id writes, and the ids that continue a text with given bytes.

    Special tokens write nothing and are never written (`banned`), ends aside. Continuations are encoded by a
    copy of the tokenizer that adds no prefix space, normalises nothing and takes special tokens in a text for
    plain text; where its answer is not exact, by the longest matching tokens.

    Raises `TokenizerError` if the tokenizer does not round-trip.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], size: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"{name}: its tokenizer has no fast (tokenizers-library) form, so ids cannot be turned into "
                "exact bytes; convert it, or give another with MemberConfig(tokenizer=...)"
            )
        self.ends = ends
        self.size = size
        spec = json.loads(backend.to_str())
        self._bytes = _token_bytes(spec, size)
        self.banned = frozenset(i for i, b in enumerate(self._bytes) if not b) - ends
        self._encoder = Tokenizer.from_str(json.dumps(_continuing(spec)))
        self._encoder.encode_special_tokens = True
        self._ids: dict[bytes, int] = {}
        for token, data in enumerate(self._bytes):
            if data and token not in ends:
                self._ids.setdefault(data, token)
        self._longest = max(map(len, self._ids), default=0)
        self.unwritable = frozenset(b for b in range(256) if bytes([b]) not in self._ids)
        self._memo: dict[bytes, list[int]] = {}
        self._check(name, tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """What the token writes; nothing for special tokens and ends."""
        return self._bytes[token]

    @functools.cached_property
    def starters(self) -> tuple[int, ...]:
        """Tokens that start with whitespace, and the ends: after them a word is over."""
        return tuple(i for i, data in enumerate(self._bytes) if i in self.ends or starts_with_space(data))

    def can_write(self, data: bytes) -> bool:
        """Whether there are tokens for all of ``data``; a few control characters have none in some tokenizers."""
        return not self.unwritable or self.unwritable.isdisjoint(data) or self._encode_text(data) is not None

    def encode(self, data: bytes) -> list[int]:
        """Tokens that write exactly ``data`` after any text; it must be what `can_write` allows."""
        ids = self._memo.get(data)
        if ids is None:
            ids = self._encode_text(data)
            if ids is None:
                ids = self._longest_matches(data)
            if len(self._memo) > 50_000:
                self._memo.clear()
            self._memo[data] = ids
        return ids

    def spell(self, token: int) -> list[int]:
        """Guides are over the same tokens."""
        return [token]

    @functools.cached_property
    def guides(self) -> Guides:
        """Guides over these tokens, for answers held to a grammar."""
        return Guides(self._bytes, self.ends, self.encode)

    def _encode_text(self, data: bytes) -> list[int] | None:
        """The tokenizer's own tokens, or None if they do not write ``data``."""
        try:
            ids = self._encoder.encode(data.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return None
        return ids if b"".join(self._bytes[i] for i in ids) == data else None

    def _longest_matches(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                if (token := self._ids.get(data[at : at + size])) is not None:
                    ids.append(token)
                    at += size
                    break
            else:
                raise TokenizerError(f"no token writes the byte 0x{data[at]:02x}")
        return ids

    def _check(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        for sample in SAMPLES:
            ids = self._encode_text(sample.encode())
            if ids is None:
                wrong = self._encoder.encode(sample, add_special_tokens=False).ids
                got = b"".join(self._bytes[i] for i in wrong).decode("utf-8", "replace")
                raise _no_round_trip(name, sample, got)
            shown = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            # Decoders of the SentencePiece kind drop the space that their encoder would have put in front.
            if shown not in (sample, sample.removeprefix(" ")):
                raise _no_round_trip(name, sample, shown)
        if missing := self.unwritable & _NEEDED:
            raise TokenizerError(
                f"{name}: its tokenizer has no token for the byte 0x{min(missing):02x}, so it cannot follow "
                "every text another member may write; choose a model with byte-level BPE or byte fallback"
            )


# What texts are made of: tab, newline, printable ASCII, and the bytes of UTF-8 up to emoji.
_NEEDED = frozenset({0x09, 0x0A, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)})


def _no_round_trip(name: str, sample: str, got: str) -> TokenizerError:
    at = next((i for i, (a, b) in enumerate(zip(sample, got, strict=False)) if a != b), 0)
    near = slice(max(0, at - 8), at + 12)
    return TokenizerError(
        f"{name}: its tokenizer does not round-trip: {sample[near]!r} came back as {got[near]!r}; "
        "choose a model with byte-level BPE or byte fallback, or another MemberConfig(tokenizer=...)"
    )


def _token_bytes(spec: dict[str, Any], size: int) -> list[bytes]:
    """What each id below ``size`` writes; nothing for special tokens and for ids that name no token."""
    model = spec["model"]
    vocab = model["vocab"]
    items: Iterable[tuple[str, int]]
    items = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
    parts = list(_parts(spec.get("decoder")))
    kinds = {part["type"] for part in parts}
    table = [b""] * size
    if "ByteLevel" in kinds:
        to_byte = {char: byte for byte, char in _byte_level_alphabet().items()}
        for piece, i in items:
            if i < size and all(c in to_byte for c in piece):
                table[i] = bytes(to_byte[c] for c in piece)
    else:
        fallback = "ByteFallback" in kinds
        for piece, i in items:
            if i < size:
                table[i] = _piece_bytes(piece, fallback)
        unknown = model.get("unk_id") if model.get("unk_id") is not None else model.get("unk_token")
        if isinstance(unknown, str) and isinstance(vocab, dict):
            unknown = vocab.get(unknown)
        if isinstance(unknown, int):
            table[unknown] = b""
    for added in spec.get("added_tokens", []):
        if added["id"] < size:
            table[added["id"]] = b"" if added["special"] else added["content"].encode()
    return table


def _piece_bytes(piece: str, fallback: bool) -> bytes:
    """A SentencePiece piece: ``▁`` is a space, ``<0x41>`` is a byte where there is byte fallback."""
    if fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[int, str]:
    """Byte -> the printable character that byte-level BPE (GPT-2) writes for it.

    Printable Latin-1 bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(b for b in range(256) if b not in alphabet):
        alphabet[byte] = chr(0x100 + offset)
    return alphabet


def _parts(component: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """The steps of a normaliser, pre-tokeniser or decoder, a ``Sequence`` unrolled."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for key in ("normalizers", "pretokenizers", "decoders"):
            for part in component.get(key, []):
                yield from _parts(part)
    else:
        yield component


def _continuing(spec: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer's description, changed so that it encodes the middle of a text and loses nothing."""
    spec = dict(spec)
    kept = [p for p in _parts(spec.get("normalizer")) if p["type"] == "Replace" and p["content"] == "▁"]
    spec["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    steps = []
    for part in _parts(spec.get("pre_tokenizer")):
        part = dict(part)
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
        elif part["type"] == "WhitespaceSplit":
            continue
        steps.append(part)
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps} if steps else None
    spec["post_processor"] = None
    spec["truncation"] = spec["padding"] = None
    return spec
