"""A model's tokenizer without its weights, for members that run somewhere else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from adafuse_engine import bundled
from adafuse_engine.config import MemberConfig
from adafuse_engine.errors import ContextWindowError, EmptyPromptError
from adafuse_engine.members.local.exclusive import exclusive
from adafuse_engine.members.local.gguf import gguf_tokenizer
from adafuse_engine.members.local.loading import mapped, source_of
from adafuse_engine.members.local.prompts import prompt_ids
from adafuse_engine.members.local.tokens import Vocabulary, end_tokens
from adafuse_engine.types import Prompt

__all__ = ["Tokenizing", "load_tokenizing"]


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Prompts -> ids, and ids <-> bytes, for a member of that name. ``context_window``: by the model's config."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    context_window: int | None
    chat_template: str | None = None

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, no special tokens added."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def prompt_ids(self, prompt: Prompt, context_window: int) -> list[int]:
        """The prompt as the model sees it.

        Raises `EmptyPromptError`, `ContextWindowError`.
        """
        ids = prompt_ids(self.tokenizer, prompt, self.vocabulary.ends, self.chat_template)
        if not ids and prompt == "":
            # As a model without a BOS was trained: behind the end of another text.
            bos = self.tokenizer.bos_token_id
            ids = [bos if bos is not None else self.tokenizer.eos_token_id or min(self.vocabulary.ends)]
        if not ids:
            raise EmptyPromptError(f"the prompt has no tokens for member {self.name!r}")
        if len(ids) >= context_window:
            raise ContextWindowError(self.name, len(ids), context_window)
        return ids


def load_tokenizing(config: MemberConfig, source: str) -> Tokenizing:
    """The tokenizer that ``source`` (a folder, hub id, ``.gguf`` path or ``bundled:NAME``) names, for a member.

    Raises `LoadError`.
    """
    if source.startswith(bundled.PREFIX):
        source = str(bundled.fetch(source))
    if source.endswith(".gguf"):
        folder = gguf_tokenizer(Path(source).expanduser())
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        with mapped(source, str(folder)), exclusive(bars=False):
            tokenizer = AutoTokenizer.from_pretrained(folder)
        ends, size, window = frozenset(facts["ends"]), facts["size"], facts["context_window"]
    else:
        place = source_of(source)
        code = config.trust_remote_code
        with mapped(source, place), exclusive(bars=False):
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=code)
            model = AutoConfig.from_pretrained(place, trust_remote_code=code)
            try:
                generation = GenerationConfig.from_pretrained(place)
            except OSError:
                generation = None
        ends = end_tokens(SimpleNamespace(config=model, generation_config=generation), tokenizer)
        text = model.get_text_config()
        size, window = text.vocab_size, getattr(text, "max_position_embeddings", None)
    vocabulary = Vocabulary(config.label, tokenizer, ends, size)
    return Tokenizing(config.label, tokenizer, vocabulary, window, config.chat_template)
