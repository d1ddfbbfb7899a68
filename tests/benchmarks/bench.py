"""What the measures share: the members, how much of everything to measure, and how time is taken."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from threading import Event
from time import perf_counter, sleep

import torch

from adafuse_engine import Engine
from adafuse_engine.members.local.kv_cache import SlotCache
from adafuse_engine.members.local.slots import Slots
from tests.benchmarks import prompts

MODELS = ["bundled:smollm2-135m-instruct", "bundled:gemma-3-270m"]
FEW = 8
"""Answers of fewer tokens say nothing about writing: the walls are compared on others."""


@dataclass(frozen=True)
class Result:
    name: str
    ratio: float
    target: str
    met: bool
    detail: str

    @classmethod
    def of(cls, name, ratio, target, detail):
        """``target`` is "<= 1.2", ">= 25" or "< 10"; what follows the number is its unit."""
        sign, limit = target.split()[:2]
        met = {"<=": ratio <= float(limit), ">=": ratio >= float(limit), "<": ratio < float(limit)}[sign]
        return cls(name, ratio, target, met, detail)


@dataclass(frozen=True)
class Size:
    """How much to measure. ``plain_words``: of the plain road; ``words``: what that is extrapolated to."""

    prompts: int = 3
    ablated: int = 2
    repeats: int = 2
    tokens: int = 24
    gated: int = 6
    at_once: int = 8
    batch_tokens: int = 6
    passage: int = 480
    plain_words: int = 3
    words: int = 24
    context: int = 1500
    long: int = 4000
    requests: int = 1000
    settled: int = 100


FULL = Size()
QUICK = Size(
    prompts=1,
    ablated=1,
    repeats=1,
    tokens=10,
    gated=2,
    at_once=3,
    batch_tokens=4,
    passage=200,
    plain_words=2,
    words=8,
    context=500,
    long=1000,
    requests=200,
)


class Bench:
    """An engine (on the two packaged models if none is given), and ways to time it and its members alone."""

    def __init__(self, size: Size = FULL, engine: Engine | None = None) -> None:
        self.size = size
        self.engine = engine or Engine.from_models(MODELS, progress=False)
        self.members = self.engine._members
        for _ in range(2):
            self.engine.generate("Warm up: one, two, three,", max_tokens=4)

    def settle(self):
        """Wait until every slot is given back: that happens after an answer is handed over, or a stream closed."""
        deadline = perf_counter() + 60
        while any(member.model.runner.slots.busy for member in self.members):
            if perf_counter() > deadline:
                raise TimeoutError("a request still holds its slot")
            sleep(0.001)
        for member in self.members:
            done = Event()
            member.model.worker.post(done.set)
            if not done.wait(60):
                raise TimeoutError("the worker does not come to an end")

    def forget(self):
        """Drop what earlier prompts left in the KV caches; the memory stays."""
        self.settle()
        for member in self.members:
            slots = member.model.runner.slots
            slots._idle = {slot: [] for slot in slots._idle}

    def empty(self):
        """Free the KV caches too, so that their size is that of what comes next."""
        self.settle()
        for member in self.members:
            runner = member.model.runner
            limit = getattr(runner.cache, "most", None)
            runner.cache = SlotCache(len(runner.cache.layers))
            runner.cache.most = limit
            runner.slots = Slots(runner.slots._kept)

    def ask(self, prompt, **options):
        """Wall seconds of one answer with nothing reused, and the answer."""
        self.forget()
        start = perf_counter()
        done = self.engine.generate(prompt, **options)
        return perf_counter() - start, done

    def alone(self, member, prompt, tokens):
        """Wall seconds of a member's own greedy `generate` for exactly so many tokens."""
        ids = torch.tensor([member.prompt_ids(prompt)])
        start = perf_counter()
        with torch.no_grad():
            member.model.runner.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return perf_counter() - start

    def turns(self, *sides):
        """The medians of what each side gives; they take turns, in the other order every second time."""
        taken = [[] for _ in sides]
        for turn in range(self.size.repeats):
            order = list(range(len(sides)))
            for i in order[::-1] if turn % 2 else order:
                taken[i].append(sides[i]())
        return [statistics.median(walls) for walls in taken]

    def against_members(self, texts, combine, **options):
        """Median over prompts of engine wall / ``combine`` of the members' own walls; the walls and forwards."""
        ratios, details, short = [], [], 0
        for prompt in texts:
            # What grows for a longer prompt grows here, before time is taken.
            self.ask(prompt, max_tokens=1, **options)
            wall, done = self.ask(prompt, max_tokens=self.size.tokens, **options)
            if done.usage.completion_tokens < FEW:
                short += 1
                continue
            counts = [(m, max(1, len(m.tokenize(done.text)))) for m in self.members]
            for member in self.members:
                self.alone(member, prompt, 1)
            walls, owns = [wall], [combine([self.alone(m, prompt, n) for m, n in counts])]
            for _ in range(self.size.repeats - 1):
                owns.append(combine([self.alone(m, prompt, n) for m, n in counts]))
                walls.append(self.ask(prompt, max_tokens=self.size.tokens, **options)[0])
            wall, own = statistics.median(walls), statistics.median(owns)
            ratios.append(wall / own)
            details.append(f"{wall:.1f}/{own:.1f} s, {passes(done)} forwards")
            if len(ratios) == self.size.prompts:
                break
        if not ratios:
            raise RuntimeError(f"all {short} answers have fewer than {FEW} tokens: nothing to compare walls on")
        left_out = f"; {short} answers under {FEW} tokens left out" if short else ""
        return statistics.median(ratios), "; ".join(details) + left_out

    def on_and_off(self, on, off):
        """Wall with ``on`` / wall with ``off``, and what they did."""
        walls, forwards = [0.0, 0.0], [0, 0]
        for prompt in prompts.short(self.size.ablated):
            counted = [0, 0]

            def side(i, options, prompt=prompt, counted=counted):
                wall, done = self.ask(prompt, max_tokens=self.size.tokens, **options)
                counted[i] = passes(done)
                return wall

            self.ask(prompt, max_tokens=1)
            for i, wall in enumerate(self.turns(partial(side, 0, on), partial(side, 1, off))):
                walls[i] += wall
                forwards[i] += counted[i]
        detail = f"on {walls[0]:.1f} s, {forwards[0]} forwards; off {walls[1]:.1f} s, {forwards[1]} forwards"
        return walls[0] / walls[1], detail


def passes(done):
    """Forward passes of all members for one answer."""
    return sum(m.forward_passes for m in done.usage.members)
