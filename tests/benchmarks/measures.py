"""One function per target: each measures its two sides in turn, in this process, and gives their ratio."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
from dataclasses import dataclass
from time import perf_counter

import torch

from adafuse_engine import DecodingConfig, Engine
from tests.benchmarks import prompts
from tests.reference.decoder import Reference, decode


@dataclass(frozen=True)
class Result:
    name: str
    ratio: float
    target: str
    met: bool
    detail: str


class Bench:
    """The two packaged models, and what the measures share."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        models = ["bundled:smollm2-135m-instruct", "bundled:gemma-3-270m"]
        self.engine = Engine.from_models(models, progress=False)
        self.members = self.engine._members
        self.engine.generate("Warm up:", max_tokens=4)

    def forget(self):
        """Drop what earlier prompts left in the KV caches."""
        for member in self.members:
            slots = member.model.runner.slots
            slots._idle = {slot: [] for slot in slots._idle}

    def ask(self, prompt, **options):
        """Wall seconds of one answer with nothing reused, and the answer."""
        self.forget()
        start = perf_counter()
        done = self.engine.generate(prompt, **options)
        return perf_counter() - start, done

    def alone(self, member, prompt, text):
        """Wall seconds of a member's own greedy `generate` for as many tokens as ``text`` has for it."""
        ids = member.prompt_ids(prompt)
        tokens = max(1, len(member.tokenize(text)))
        start = perf_counter()
        with torch.no_grad():
            member.model.runner.model.generate(
                torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        return perf_counter() - start

    def against_members(self, texts, combine, **options):
        """Engine wall / ``combine`` of the members' own walls, medians of the ratios; forwards and walls."""
        ratios, details = [], []
        for prompt in texts:
            self.ask(prompt, max_tokens=1)  # what grows for a longer prompt has grown before time is taken
            wall, done = self.ask(prompt, max_tokens=24, **options)
            if done.usage.completion_tokens < 8 and len(texts) > 1:
                continue  # an answer that ends at once says nothing about writing
            own = [self.alone(m, prompt, done.text) for m in self.members]
            ratios.append(wall / combine(own))
            forwards = sum(m.forward_passes for m in done.usage.members)
            details.append(f"{wall:.1f}/{combine(own):.1f} s, {forwards} forwards")
        return statistics.median(ratios), "; ".join(details)


class Forgetful(dict):
    """Remembers nothing from one question to the next, and counts the questions."""

    asked = 0

    def __contains__(self, key):
        self.asked += 1
        self.clear()
        return False


def reference_over_engine(b):
    prompt = prompts.passage_of(b.engine.tokenize, 480) + "\n\nQuestion: What is this about?\nAnswer:"
    tokens = 1 if b.quick else 2
    settings = DecodingConfig(preset="paper", max_tokens=tokens)
    wall, done = b.ask(prompt, preset="paper", max_tokens=24)
    members = [
        Reference(m.model.runner.model, m.model.vocabulary, m.prompt_ids(prompt), known=Forgetful())
        for m in b.members
    ]
    start = perf_counter()
    decode(members, settings)
    slow = perf_counter() - start
    forwards = sum(m.known.asked for m in members)
    written = max(1, done.usage.completion_tokens)
    ratio = (slow / tokens) / (wall / written)
    detail = (
        f"{forwards} plain forwards; seconds a token: {slow / tokens:.1f} over {tokens} tokens, "
        f"engine {wall / written:.2f} over {written}"
    )
    return Result("reference_over_engine", ratio, ">= 25", ratio >= 25, detail)


def paper_over_members(b):
    ratio, detail = b.against_members(prompts.short(1 if b.quick else 4), sum, preset="paper")
    return Result("paper_over_members", ratio, "<= 1.2", ratio <= 1.2, detail)


def lazy_over_slowest(b):
    ratio, detail = b.against_members(prompts.short(1 if b.quick else 3), max, gate="any_certain", catch_up="lazy")
    return Result("lazy_over_slowest", ratio, "<= 1.0", ratio <= 1.0, detail)


def agreed_over_members(b):
    ratio, detail = b.against_members(prompts.AGREED[: 1 if b.quick else 3], sum)
    return Result("agreed_over_members", ratio, "<= 1.05", ratio <= 1.05, detail)


def gated_forwards_saved(b):
    counts = {"never": 0, "any_certain": 0}
    for prompt in prompts.short(2 if b.quick else 6):
        for gate in counts:
            _, done = b.ask(prompt, gate=gate, catch_up="lazy", max_tokens=16, stop="\n")
            counts[gate] += sum(m.forward_passes for m in done.usage.members)
    ratio = 1 - counts["any_certain"] / counts["never"]
    return Result("gated_forwards_saved", ratio, ">= 0.30", ratio >= 0.30, str(counts))


def batch_speedup(b):
    count = 4 if b.quick else 8
    texts = [p[-400:] for p in prompts.short(count)]
    b.forget()
    start = perf_counter()
    one = [b.engine.generate(p, max_tokens=8).text for p in texts]
    alone = perf_counter() - start
    b.forget()
    start = perf_counter()

    async def at_once():
        return await asyncio.gather(*(b.engine.agenerate(p, max_tokens=8) for p in texts))

    many = [c.text for c in asyncio.run(at_once())]
    together = perf_counter() - start
    ratio = alone / together
    detail = f"{count} requests: {alone:.1f} s in turn, {together:.1f} s at once; answers equal: {one == many}"
    return Result("batch_speedup", ratio, ">= 2.5", ratio >= 2.5, detail)


def prefix_reuse_first_word(b):
    context = prompts.passage_of(b.engine.tokenize, 500 if b.quick else 1500)
    b.forget()
    times = []
    for question in ("What is it about?", "When did it happen?"):
        start = perf_counter()
        stream = b.engine.stream(prompts.prompt(context, question), max_tokens=8)
        next(stream)
        times.append(perf_counter() - start)
        stream.close()
    ratio = times[1] / times[0]
    return Result(
        "prefix_reuse_first_word", ratio, "<= 0.15", ratio <= 0.15, f"{times[1]:.2f} s against {times[0]:.2f} s"
    )


def kv_bytes_of_branches(b):
    from tests.support import tiny

    text = "word " * (250 if b.quick else 1000)
    held = []
    for branches in (1, 3):
        member = tiny.member("llama", "a", 1)
        other = tiny.member("llama", "b", 2)
        with Engine(members=[member, other]) as engine:
            engine.generate(text, branches=branches, max_tokens=8)
        held.append(member.model.runner.cache.bytes)
    ratio = held[1] / held[0]
    return Result(
        "kv_bytes_of_branches", ratio, "<= 1.05", ratio <= 1.05, f"{held} bytes, a tiny model, four tokens a word"
    )


def outside_forwards(b):
    shares = []
    for prompt in prompts.short(1 if b.quick else 3):
        b.ask(prompt, max_tokens=1)
        wall, done = b.ask(prompt, max_tokens=16)
        shares.append(1 - sum(m.seconds for m in done.usage.members) / wall)
    ratio = statistics.median(shares)
    return Result("outside_forwards", ratio, "<= 0.10", ratio <= 0.10, f"{len(shares)} answers")


def memory_growth(b):
    from tests.support import tiny

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    requests = 300 if b.quick else 1000
    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
        for i in range(100):
            engine.generate(f"Line {i}:", max_tokens=6)
        before = resident()
        for i in range(100, requests):
            engine.generate(f"Line {i}:", max_tokens=6)
        growth = resident() - before
    return Result("memory_growth", growth, "< 10 MB", growth < 10, f"MB over {requests - 100} requests")


def drafting_gain(b):
    return _ablation(b, "drafting")


def early_decisions_gain(b):
    return _ablation(b, "early_decisions")


def _ablation(b, switch):
    walls, forwards = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for prompt in prompts.short(1 if b.quick else 3):
        b.ask(prompt, max_tokens=1)
        for on in (True, False, False, True):
            wall, done = b.ask(prompt, max_tokens=16, **{switch: on})
            walls[on] += wall
            forwards[on] += sum(m.forward_passes for m in done.usage.members)
    ratio = walls[True] / walls[False]
    detail = f"wall on/off; {forwards[True]} forwards on, {forwards[False]} off"
    return Result(f"{switch}_gain", ratio, "< 1", ratio < 1, detail)


ALL = [
    reference_over_engine,
    paper_over_members,
    lazy_over_slowest,
    agreed_over_members,
    gated_forwards_saved,
    batch_speedup,
    prefix_reuse_first_word,
    kv_bytes_of_branches,
    outside_forwards,
    memory_growth,
    drafting_gain,
    early_decisions_gain,
]
