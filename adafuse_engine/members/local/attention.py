"""Who sees whom: attention masks for trees under a prefix, full and sliding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from adafuse_engine.members.local.runner import Feed, Tree

__all__ = ["Masks"]


@dataclass(frozen=True, slots=True)
class Masks:
    """What a model's layers may attend to.

    ``window``: most positions back (its own included) that sliding layers see, None without such layers.
    ``mixed``: full and sliding layers, which take a dict of masks. ``supported``: false for other kinds.
    """

    window: int | None
    mixed: bool
    supported: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Masks:
        """From a model's config."""
        kinds = set(getattr(config, "layer_types", None) or [])
        window = getattr(config, "sliding_window", None)
        supported = kinds <= {"full_attention", "sliding_attention"}
        if kinds:
            sliding = "sliding_attention" in kinds
            return cls(window if sliding else None, sliding, supported, dtype)
        # Without layer types a window counts for every layer, unless the config says that it is not used.
        if not getattr(config, "use_sliding_window", True):
            window = None
        return cls(window, False, True, dtype)

    def build(
        self, batch: Sequence[tuple[Tree, Feed, int]], positions: Tensor, width: int, device: torch.device
    ) -> Tensor | dict[str, Tensor]:
        """Additive masks ``[batch, 1, queries, width]`` for the feeds of a forward.

        ``positions[b, q]``: position of each query. A query sees the whole prefix, its ancestors and itself;
        in sliding layers only those of them that are less than a window behind.
        """
        size, queries = positions.shape
        seen = torch.zeros((size, queries, width), dtype=torch.bool)
        # Where the columns stand in the text: a prefix column at its own number, a node behind its ancestors.
        places = torch.arange(width).expand(size, width).clone() if self.window else None
        for b, (tree, feed, start) in enumerate(batch):
            n = len(feed.tokens)
            if feed.prefill:
                seen[b, :n] = torch.arange(width)[None, :] <= torch.arange(start, start + n)[:, None]
            else:
                prefix = len(tree.prefix)
                seen[b, :n, :prefix] = True
                for q in range(n):
                    seen[b, q, [tree.columns[a] for a in tree.ancestors(start + q)]] = True
                if places is not None and len(tree.columns) > 1:
                    places[b, tree.columns[1:]] = torch.tensor([prefix - 1 + d for d in tree.depths[1:]])
            # A padding query must see something, or its softmax is NaN.
            seen[b, n:, 0] = True
        full = self._additive(seen, device)
        if places is None:
            return full
        near = positions[:, :, None] - places[:, None, :] < (self.window or 0)
        near[:, :, 0] |= ~(seen & near).any(dim=2)
        sliding = self._additive(seen & near, device)
        return {"full_attention": full, "sliding_attention": sliding} if self.mixed else sliding

    def _additive(self, seen: Tensor, device: torch.device) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=device)
        hidden = ~seen.to(device)
        return mask.masked_fill_(hidden, torch.finfo(self.dtype).min)[:, None]
