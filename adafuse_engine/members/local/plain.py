"""Forwards without a cache: for models that cannot attend to a tree, and as what others are checked against."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adafuse_engine.members.local.runner import Feed, Runner, Tree

__all__ = ["PlainRunner", "plain_logits"]


class PlainRunner(Runner):
    """For models that cannot attend to a tree: every token is computed from its whole text, without a cache.

    Slow and always right. Takes the place of `Runner` where the self-check at load finds a difference.
    """

    chunk = 1 << 62

    def open(self, tree: Tree, ids: Sequence[int]) -> None:
        """Nothing is held per request."""

    def move(self, tree: Tree, nodes: Sequence[int]) -> None:
        """Nothing to move."""

    def _forward(self, feeds: Sequence[Feed], first: Sequence[int]) -> list[Tensor]:
        logits = []
        for feed, start in zip(feeds, first, strict=True):
            tree = feed.tree
            texts = (
                [tree.prefix]
                if feed.prefill
                else [
                    [*tree.prefix, *(tree.tokens[a] for a in reversed(tree.ancestors(n)))]
                    for n in range(start, start + len(feed.tokens))
                ]
            )
            rows = [plain_logits(self.model, text, self.device) for text in texts]
            feed.tree.tokens_processed += sum(map(len, texts)) - len(feed.tokens)
            logits.append(torch.stack(rows))
        return logits


def plain_logits(model: PreTrainedModel, ids: Sequence[int], device: torch.device) -> Tensor:
    """Logits after the last of ``ids``, by one forward without a cache: ``[vocabulary]`` in float32."""
    inputs = torch.tensor([list(ids)], device=device)
    keep: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keep = {"logits_to_keep": 1}
    with torch.inference_mode():
        output: Tensor = model(input_ids=inputs, use_cache=False, **keep).logits
    return output[0, -1].float()
