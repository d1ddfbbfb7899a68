"""Keys and values of all running requests of one model, in slots that live across rounds.

Per layer two tensors ``[slots, heads, length, dim]``. A request owns a slot: its prefix fills the first
columns, tokens of the round's tree the ones behind it, each written once at its own column. Keeping a path
moves its few columns together behind the prefix; the prefix itself is never copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["SlotCache"]

GRAIN = 256


class _SlotLayer(CacheLayerMixin):
    """One layer's slots. Where the next forward reads and writes is said by its `SlotCache`."""

    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, length = self.owner.slots, self.owner.length
        self.keys = key_states.new_zeros((slots, key_states.shape[1], length, key_states.shape[3]))
        self.values = value_states.new_zeros((slots, value_states.shape[1], length, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return (
            self.owner.write_and_read(self.keys, key_states),
            self.owner.write_and_read(self.values, value_states),
        )

    def resize(self, slots: int, length: int) -> None:
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            if (old.shape[0], old.shape[2]) == (slots, length):
                continue
            new = old.new_zeros((slots, old.shape[1], length, old.shape[3]))
            kept, columns = min(slots, old.shape[0]), min(length, old.shape[2])
            new[:kept, :, :columns] = old[:kept, :, :columns]
            setattr(self, name, new)

    def move(self, slot: int, source: Tensor, start: int) -> None:
        stop = start + source.numel()
        for tensor in (self.keys, self.values):
            tensor[slot, :, start:stop] = tensor[slot].index_select(1, source.to(tensor.device))

    def get_seq_length(self) -> int:
        return self.owner.width

    def get_max_length(self) -> int:
        return self.owner.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0


class SlotCache(Cache):
    """A `transformers` cache over slots. One per model; used by one thread."""

    def __init__(self, layers: int) -> None:
        self.slots = 0
        self.length = 0
        self.width = 0
        self.most: int | None = None
        """Columns that all slots together may have; None for no limit."""
        self._rows: list[int] = []
        self._columns = torch.empty(0, dtype=torch.long)
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots, with ``length`` columns in each. Raises `MemoryError` beyond ``most``."""
        needed = length
        if length > self.length:
            # Growth by an eighth at least keeps the copies few without doubling the memory.
            length = max(length, self.length + self.length // 8)
            length = -(-length // GRAIN) * GRAIN
        slots, length = max(slots, self.slots), max(length, self.length)
        if self.most is not None and slots * length > self.most:
            length = max(needed, self.length, self.most // slots)
            if slots * length > self.most:
                raise MemoryError(f"{slots} prompts of {length} tokens would exceed kv_max_bytes; raise it")
        if (slots, length) != (self.slots, self.length):
            self.resize(slots, length)

    def resize(self, slots: int, length: int) -> None:
        """Have exactly so many slots and columns. Where memory does not suffice for that, all is as before."""
        try:
            for layer in self.layers:
                layer.resize(slots, length)
        except BaseException:
            # Layers that have grown serve as well, but hold memory that is short. There may be too little even
            # to shrink them: then they stay as they are.
            for layer in self.layers:
                with contextlib.suppress(Exception):
                    layer.resize(self.slots, self.length)
            raise
        self.slots, self.length = slots, length

    def aim(self, rows: Sequence[int], columns: Tensor, width: int) -> None:
        """Where the next forward writes: ``rows[b]``, ``columns[b, q]``; it reads the first ``width`` columns."""
        self._rows = list(rows)
        self._columns = columns
        self.width = width

    def write_and_read(self, store: Tensor, new: Tensor) -> Tensor:
        """Write ``new`` [batch, heads, queries, dim] and return [batch, heads, width, dim]."""
        rows, columns = self._rows, self._columns
        first, last = rows[0], rows[-1]
        if len(rows) == 1:
            store[first].index_copy_(1, columns[0], new[0])
            return store[first : first + 1, :, : self.width]
        index = torch.tensor(rows, device=store.device)
        store[index[:, None], :, columns] = new.transpose(1, 2)
        if rows == list(range(first, last + 1)):
            return store[first : last + 1, :, : self.width]
        return store[index, :, : self.width]

    def move(self, slot: int, source: Sequence[int], start: int) -> None:
        """Bring the columns ``source`` of a slot, in this order, to ``start`` and the columns after it."""
        if list(source) == list(range(start, start + len(source))):
            return
        index = torch.tensor(source)
        for layer in self.layers:
            layer.move(slot, index, start)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` columns of one slot to another."""
        for layer in self.layers:
            if layer.is_initialized:
                for tensor in (layer.keys, layer.values):
                    tensor[target, :, :length] = tensor[source, :, :length]

    @property
    def bytes(self) -> int:
        """Memory held by keys and values."""
        held = [t for layer in self.layers if layer.is_initialized for t in (layer.keys, layer.values)]
        return sum(t.numel() * t.element_size() for t in held)
