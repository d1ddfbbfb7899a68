"""Forwards of one model over the trees of many requests at once. All of it runs on the device's worker thread."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from adafuse_engine.confidence import Distribution
from adafuse_engine.members.guide import Guide
from adafuse_engine.members.local.attention import Masks
from adafuse_engine.members.local.kv_cache import SlotCache
from adafuse_engine.members.local.memory import is_out_of_memory
from adafuse_engine.members.local.slots import Slots
from adafuse_engine.members.local.tokens import Vocabulary
from adafuse_engine.members.session import Fed, survivors

__all__ = ["Feed", "Row", "Runner", "Tree", "Want"]


@dataclass(frozen=True, slots=True)
class Want:
    """What a request needs to know of each distribution: how many top tokens, entropy, word starts."""

    top: int
    entropy: bool
    start_mass: bool


@dataclass(slots=True)
class Row:
    """Logits after one token and their logsumexp, on the device while children may be fed."""

    logits: Tensor
    norm: Tensor


@dataclass(slots=True)
class Tree:
    """One request's state: the prefix's ids in the first columns of a slot, and the round's tokens behind it.

    Node n of the tree (from 1) has its parent in ``parents[n]``, its token in ``tokens[n]``, its distance from
    the prefix in ``depths[n]``, its column in ``columns[n]``. Node 0 is the prefix's end. ``reused``: tokens of
    the prompt that another request had computed.
    """

    want: Want
    slot: int = -1
    prefix: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=lambda: [-1])
    tokens: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=lambda: [-1])
    rows: list[Row | None] = field(default_factory=lambda: [None])
    reused: int = 0
    forward_passes: int = 0
    tokens_processed: int = 0
    seconds: float = 0.0

    def ancestors(self, node: int) -> list[int]:
        """The node and those above it, the root left out."""
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to feed to one tree: ``parents`` by node number, -1 in a ``prefill``, which extends the prefix.

    ``guides``: none, or one per result, which says what may follow; a None there allows nothing.
    """

    tree: Tree
    parents: Sequence[int]
    tokens: Sequence[int]
    prefill: bool = False
    guides: Sequence[Guide | None] = ()


class Runner:
    """A model with its slots. `run` takes one feed per tree and makes one forward of them.

    ``chunk``: most tokens of a prompt that go into one forward, so that a long one can be cancelled and
    others get their turn. ``pace``: seconds of a forward that is no prefill, a moving average.
    """

    chunk = 512

    def __init__(self, model: PreTrainedModel, vocabulary: Vocabulary, prefix_slots: int = 4) -> None:
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        config = model.config.get_text_config()
        self.masks = Masks.of(config, model.dtype)
        self.slots = Slots(prefix_slots)
        self._open: dict[int, Tree] = {}
        self.cache = SlotCache(config.num_hidden_layers)
        self.size = vocabulary.size - len(vocabulary.banned)
        self._banned = torch.tensor(sorted(vocabulary.banned), dtype=torch.long, device=self.device)
        self._ends = torch.tensor(sorted(vocabulary.ends), dtype=torch.long, device=self.device)
        self._starters = torch.tensor(vocabulary.starters, dtype=torch.long, device=self.device)
        names = inspect.signature(model.forward).parameters
        self.pace = 0.0
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    # ---- slots

    def open(self, tree: Tree, ids: Sequence[int]) -> None:
        """Give the tree a slot for a prompt. Its prefix is then what of the prompt is known already."""
        taken = self.slots.take(ids, tree.prefix)
        tree.slot = taken.slot
        self._open[taken.slot] = tree
        if taken.source is not None:
            try:
                with torch.inference_mode():
                    self.cache.reserve(taken.slot + 1, taken.reused)
                    self.cache.copy(taken.source, taken.slot, taken.reused)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return  # without room for a copy the prompt is read from its start
        tree.prefix.extend(ids[: taken.reused])
        tree.reused = taken.reused

    def close(self, tree: Tree) -> None:
        """Take the tree's slot back; what it holds stays for later prompts. May be called again."""
        if tree.slot >= 0:
            self.slots.give(tree.slot)
            del self._open[tree.slot]
            tree.slot = -1
            # A slot that there was no memory for must not be given to the next request.
            self.slots.drop(self.cache.slots)
        tree.rows = []

    def keep(self, tree: Tree, path: Sequence[int]) -> None:
        """Make the nodes of ``path`` part of the prefix and the last of them the root; see `TokenSequence`."""
        if not path:
            return
        root = path[-1]
        kept = survivors(tree.parents, root)
        below = list(kept)[1:]
        with torch.inference_mode():
            self.move(tree, [*path, *below])
        depth = tree.depths[root]
        tree.prefix.extend(tree.tokens[n] for n in path)
        tree.parents = [-1, *(kept[tree.parents[n]] for n in below)]
        tree.tokens = [-1, *(tree.tokens[n] for n in below)]
        tree.depths = [0, *(tree.depths[n] - depth for n in below)]
        tree.columns = [-1, *range(len(tree.prefix), len(tree.prefix) + len(below))]
        tree.rows = [tree.rows[root], *(tree.rows[n] for n in below)]

    def move(self, tree: Tree, nodes: Sequence[int]) -> None:
        """Bring the nodes' columns together behind the prefix, in this order."""
        self.cache.move(tree.slot, [tree.columns[n] for n in nodes], len(tree.prefix))

    def fit(self, slots: int, length: int) -> None:
        """Have at most ``slots`` slots, of ``length`` columns: idle ones go, busy ones change their numbers."""
        with torch.inference_mode():
            for source, target in self.slots.trim(slots, length):
                tree = self._open[target] = self._open.pop(source)
                tree.slot = target
                if source < self.cache.slots:
                    self.cache.copy(source, target, len(tree.prefix) + len(tree.tokens) - 1)
            if (slots := min(slots, self.cache.slots)) and (slots, length) != (self.cache.slots, self.cache.length):
                self.cache.resize(slots, length)

    def shed(self) -> None:
        """Give up all memory that running requests can do without, and ask for less from now on."""
        busy = max(1, self.slots.busy)
        self.slots.limit = busy
        # Shrinking takes a little memory too. What cannot be had now is asked for again by the next forward.
        with contextlib.suppress(Exception):
            self.fit(busy, self.cache.length)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- forwards

    def run(self, feeds: Sequence[Feed]) -> list[list[Fed]]:
        """One forward over all feeds (of different trees). A prefill gives one result, for its last token."""
        started = perf_counter()
        with torch.inference_mode():
            first = [self._plant(feed) for feed in feeds]
            try:
                logits = self._forward(feeds, first)
                results = self._read(feeds, first, logits)
            except BaseException:
                # What was not computed must not be taken for known, by a retry or by a later prompt.
                for feed, start in zip(feeds, first, strict=True):
                    self._uproot(feed, start)
                raise
        seconds = perf_counter() - started
        if not feeds[0].prefill:
            self.pace = 0.8 * self.pace + 0.2 * seconds if self.pace else seconds
        for feed in feeds:
            feed.tree.forward_passes += 1
            feed.tree.tokens_processed += len(feed.tokens)
            feed.tree.seconds += seconds
        return results

    def _plant(self, feed: Feed) -> int:
        """Add the tokens to the tree, or to the prefix; the number of the first."""
        tree = feed.tree
        if feed.prefill:
            start = len(tree.prefix)
            tree.prefix.extend(feed.tokens)
            return start
        start = len(tree.tokens)
        for parent, token in zip(feed.parents, feed.tokens, strict=True):
            tree.columns.append(len(tree.prefix) + len(tree.tokens) - 1)
            tree.parents.append(parent)
            tree.tokens.append(token)
            tree.depths.append(tree.depths[parent] + 1)
            tree.rows.append(None)
        return start

    def _uproot(self, feed: Feed, start: int) -> None:
        """Undo `_plant`."""
        tree = feed.tree
        if feed.prefill:
            del tree.prefix[start:]
            return
        for column in (tree.parents, tree.tokens, tree.depths, tree.columns, tree.rows):
            del column[start:]

    def _forward(self, feeds: Sequence[Feed], first: Sequence[int]) -> list[Tensor]:
        """Logits per feed, ``[tokens, vocabulary]`` in float32; for a prefill its last token's only."""
        feeds_in_order = sorted(range(len(feeds)), key=lambda i: feeds[i].tree.slot)
        order = [(feeds[i].tree, feeds[i], first[i]) for i in feeds_in_order]
        queries = max(len(feed.tokens) for feed in feeds)
        width = max(len(t.prefix) + len(t.tokens) - 1 for t, _, _ in order)
        # Padding is written to a column that nobody reads.
        self._reserve(order[-1][0].slot + 1, width + 1)
        ids = torch.zeros((len(order), queries), dtype=torch.long)
        positions = torch.zeros((len(order), queries), dtype=torch.long)
        columns = torch.full((len(order), queries), width, dtype=torch.long)
        for b, (tree, feed, start) in enumerate(order):
            n = len(feed.tokens)
            ids[b, :n] = torch.tensor(feed.tokens)
            if feed.prefill:
                positions[b, :n] = columns[b, :n] = torch.arange(start, start + n)
            else:
                nodes = range(start, start + n)
                base = len(tree.prefix) - 1
                positions[b, :n] = torch.tensor([base + tree.depths[i] for i in nodes])
                columns[b, :n] = torch.tensor([tree.columns[i] for i in nodes])
        mask = self.masks.build(order, positions, width, self.device)
        self.cache.aim([t.slot for t, _, _ in order], self._moved(columns), width)
        only_last = all(feed.prefill for feed in feeds) and len({len(f.tokens) for f in feeds}) == 1
        output = self.model(
            input_ids=self._moved(ids),
            position_ids=self._moved(positions),
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1 if only_last else 0,
            **{self._cache_name: self.cache},
        ).logits
        logits: list[Tensor] = [output] * len(feeds)
        for b, i in enumerate(feeds_in_order):
            n = len(feeds[i].tokens)
            rows = output[b, :n]
            logits[i] = (rows[-1:] if feeds[i].prefill else rows).float()
        return logits

    def _reserve(self, slots: int, length: int) -> None:
        """Make room for all requests at once or, where that is too much, for those of this forward."""
        try:
            self.cache.reserve(self.slots.count, length)
        except Exception as error:
            if not is_out_of_memory(error) or slots == self.slots.count:
                raise
            self.cache.reserve(slots, length)

    def _moved(self, tensor: Tensor) -> Tensor:
        """On the model's device, without waiting for the copy."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _read(self, feeds: Sequence[Feed], first: Sequence[int], logits: Sequence[Tensor]) -> list[list[Fed]]:
        """Logits -> what the requests want to know, computed for all rows together and fetched once."""
        rows = torch.cat(list(logits)) if len(logits) > 1 else logits[0]
        rows.index_fill_(1, self._banned, -math.inf)
        self._constrain(feeds, rows)
        norms = torch.logsumexp(rows, dim=1)
        wants = [feed.tree.want for feed in feeds]
        top = min(max(want.top for want in wants), rows.shape[1])
        values, ids = torch.topk(rows, top, dim=1)
        unknown = torch.full_like(norms, math.nan)
        columns = [
            self._mass(rows, norms, self._ends),
            self._mass(rows, norms, self._starters) if any(w.start_mass for w in wants) else unknown,
            _entropy(rows, norms) if any(w.entropy for w in wants) else unknown,
            self._under_parents(feeds, first, rows, norms),
        ]
        # Ids are whole numbers below 2**24, which float32 holds exactly: so one transfer brings everything.
        facts = torch.cat([torch.stack(columns, dim=1), values - norms[:, None], ids.float()], dim=1).tolist()

        results: list[list[Fed]] = []
        at = 0
        for feed in feeds:
            fed = []
            for _ in range(1 if feed.prefill else len(feed.tokens)):
                end, begin, spread, logprob, *ranked = facts[at]
                want = feed.tree.want.top
                logprobs, tokens = ranked[:top][:want], ranked[top:][:want]
                distribution = Distribution(tuple(map(int, tokens)), tuple(logprobs), end, begin, spread, self.size)
                fed.append(Fed(logprob, distribution))
                at += 1
            results.append(fed)
        return results

    def _constrain(self, feeds: Sequence[Feed], rows: Tensor) -> None:
        """Leave out of each row what its guide does not allow."""
        at = 0
        for feed in feeds:
            for i, guide in enumerate(feed.guides):
                if guide is None:
                    rows[at + i] = -math.inf
                    continue
                bits = np.frombuffer(guide.mask(), dtype=np.uint8)
                allowed = np.unpackbits(bits, count=rows.shape[1], bitorder="little").astype(bool)
                rows[at + i].masked_fill_(self._moved(torch.from_numpy(~allowed)), -math.inf)
            at += 1 if feed.prefill else len(feed.tokens)

    def _under_parents(self, feeds: Sequence[Feed], first: Sequence[int], rows: Tensor, norms: Tensor) -> Tensor:
        """Each new token's log-probability under its parent, ``[rows]``; the rows are handed to their nodes."""
        picked: list[Tensor] = []
        for feed, start in zip(feeds, first, strict=True):
            tree = feed.tree
            if feed.prefill:
                tree.rows[0] = Row(rows[len(picked)], norms[len(picked)])
                picked.append(torch.zeros_like(norms[0]))
                continue
            for node in range(start, start + len(feed.tokens)):
                tree.rows[node] = Row(rows[len(picked)], norms[len(picked)])
                parent = tree.rows[tree.parents[node]]
                if parent is None:
                    raise RuntimeError("a parent was not fed before its child")
                picked.append(parent.logits[tree.tokens[node]] - parent.norm)
        return torch.stack(picked)

    @staticmethod
    def _mass(rows: Tensor, norms: Tensor, tokens: Tensor) -> Tensor:
        """Log mass of some tokens in each row; -inf if there are none."""
        if not len(tokens):
            return torch.full_like(norms, -math.inf)
        return torch.logsumexp(rows.index_select(1, tokens), dim=1) - norms


def _entropy(rows: Tensor, norms: Tensor) -> Tensor:
    logs = rows - norms[:, None]
    return -(logs.exp() * logs.nan_to_num(neginf=0.0)).sum(dim=1)
