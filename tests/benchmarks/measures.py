"""One function per target: each measures its two sides in turn, in this process, and gives their ratio."""

from __future__ import annotations

import asyncio
import statistics
from time import perf_counter

from adafuse_engine.chat import schema_grammar
from tests.benchmarks import prompts
from tests.benchmarks.bench import Result, passes
from tests.benchmarks.memory import kv_bytes_of_branches, memory_growth
from tests.benchmarks.plain import walk


def reference_over_engine(b):
    prompt = prompts.passage_of(b.engine.tokenize, b.size.passage) + "\n\nQuestion: What is this about?\nAnswer:"
    b.ask(prompt, preset="paper", max_tokens=4)
    most = 4 * b.size.words  # tokens; the words are what ends it
    text = ""

    def engine():
        nonlocal text
        b.forget()
        text, start = "", perf_counter()
        for chunk in b.engine.stream(prompt, preset="paper", max_tokens=most):
            text += chunk.text
            if len(text.split()) >= b.size.words:
                break
        return perf_counter() - start

    [wall] = b.turns(engine)
    road = walk(b.members, prompt, b.size.plain_words, most, preset="paper")
    words = max(1, len(text.split()))
    per_word = road.seconds / max(1, road.words)
    ratio = per_word * words / wall
    nothing_known = ratio * road.asked / max(1, road.passes)
    detail = (
        f"prompt of {b.engine.count_tokens(prompt)} tokens; engine {wall:.1f} s for {words} words; plain road "
        f"{per_word:.1f} s a word over {road.words} words ({road.rounds} rounds, {road.passes} forwards), "
        f"extrapolated linearly; same text: {text.startswith(road.text)}; about {nothing_known:.0f} if nothing "
        f"were remembered within a round either ({road.asked} forwards)"
    )
    return Result.of("reference_over_engine", ratio, ">= 25", detail)


def paper_over_members(b):
    ratio, detail = b.against_members(prompts.short(3 * b.size.prompts), sum, preset="paper")
    return Result.of("paper_over_members", ratio, "<= 1.2", detail)


def lazy_over_slowest(b):
    texts = prompts.short(3 * b.size.prompts)
    ratio, detail = b.against_members(texts, max, gate="any_certain", catch_up="lazy")
    return Result.of("lazy_over_slowest", ratio, "<= 1.0", detail)


def agreed_over_members(b):
    ratio, detail = b.against_members(prompts.AGREED[: b.size.prompts], sum)
    return Result.of("agreed_over_members", ratio, "<= 1.05", detail)


def gated_forwards_saved(b):
    counts = {"never": 0, "any_certain": 0}
    for prompt in prompts.short(b.size.gated):
        for gate in counts:
            _, done = b.ask(prompt, gate=gate, catch_up="lazy", max_tokens=16, stop="\n")
            counts[gate] += passes(done)
    ratio = 1 - counts["any_certain"] / counts["never"]
    detail = f"{b.size.gated} prompts: never {counts['never']}, any_certain {counts['any_certain']}"
    return Result.of("gated_forwards_saved", ratio, ">= 0.30", detail)


def batch_speedup(b):
    texts = [p[-400:] for p in prompts.short(b.size.at_once)]
    answers = {}

    def in_turn():
        b.forget()
        start = perf_counter()
        answers["turn"] = [b.engine.generate(p, max_tokens=b.size.batch_tokens).text for p in texts]
        return perf_counter() - start

    async def gather(tokens):
        return await asyncio.gather(*(b.engine.agenerate(p, max_tokens=tokens) for p in texts))

    def at_once():
        b.forget()
        start = perf_counter()
        answers["once"] = [c.text for c in asyncio.run(gather(b.size.batch_tokens))]
        return perf_counter() - start

    asyncio.run(gather(1))  # makes the slots
    alone, together = b.turns(in_turn, at_once)
    words = {road: sum(len(text.split()) for text in texts) for road, texts in answers.items()}
    ratio = (words["once"] / together) / (words["turn"] / alone)
    equal = answers["once"] == answers["turn"]
    detail = f"{len(texts)} requests: {alone:.1f} s in turn, {together:.1f} s at once; answers equal: {equal}"
    return Result.of("batch_speedup", ratio, ">= 2.5", detail)


def event_loop_gap(b):
    """The longest time the callers' event loop stood still, in ms, while half of them asked for JSON."""
    texts = [p[-400:] for p in prompts.short(b.size.at_once)]
    grammar = schema_grammar({"type": "object", "properties": {"about": {"type": "string", "maxLength": 20}}})
    gaps = []

    async def tick():
        last = perf_counter()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(perf_counter() - last)
            last = perf_counter()

    async def serve():
        ticking = asyncio.create_task(tick())
        options = [{}, {"grammar": grammar}] * len(texts)
        asked = (b.engine.agenerate(p, max_tokens=b.size.tokens, **o) for p, o in zip(texts, options, strict=False))
        await asyncio.gather(*asked)
        ticking.cancel()

    b.forget()
    asyncio.run(serve())
    gaps.sort()
    detail = f"{len(texts)} callers; {len(gaps)} ticks, half of them within {gaps[len(gaps) // 2] * 1000:.1f} ms"
    return Result.of("event_loop_gap", gaps[-1] * 1000, "<= 100 ms", detail)


def prefix_reuse_first_word(b):
    def first_word(prompt):
        start = perf_counter()
        stream = b.engine.stream(prompt, max_tokens=8)
        next(stream)
        taken = perf_counter() - start
        stream.close()
        b.settle()
        return taken

    context = prompts.passage_of(b.engine.tokenize, b.size.context)
    # A stranger of the same length: its first word finds the caches as large as they will be.
    first_word(prompts.prompt(" ".join(reversed(context.split(" "))), "What is it about?"))
    pairs = []
    for _ in range(b.size.repeats):
        b.forget()
        pairs.append([first_word(prompts.prompt(context, q)) for q in ("What is it about?", "When did it happen?")])
    first, second = (statistics.median(times) for times in zip(*pairs, strict=True))
    detail = f"{second:.2f} s against {first:.2f} s, context of {b.engine.count_tokens(context)} tokens"
    return Result.of("prefix_reuse_first_word", second / first, "<= 0.15", detail)


def outside_forwards(b):
    shares = []
    for prompt in prompts.short(b.size.prompts):
        b.ask(prompt, max_tokens=1)
        wall, done = b.ask(prompt, max_tokens=b.size.tokens)
        # One request: no forward is shared, and the members' forwards run one after the other on one thread.
        shares.append(1 - sum(m.seconds for m in done.usage.members) / wall)
    return Result.of(
        "outside_forwards", statistics.median(shares), "<= 0.10", f"{len(shares)} answers, one at a time"
    )


def drafting_gain(b):
    ratio, detail = b.on_and_off({"drafting": True}, {"drafting": False})
    return Result.of("drafting_gain", ratio, "< 1", detail)


def early_decisions_gain(b):
    ratio, detail = b.on_and_off({"early_decisions": True}, {"early_decisions": False})
    return Result.of("early_decisions_gain", ratio, "< 1", detail)


def lazy_catch_up_gain(b):
    lazy, eager = ({"gate": "any_certain", "catch_up": how} for how in ("lazy", "eager"))
    ratio, detail = b.on_and_off(lazy, eager)
    return Result.of("lazy_catch_up_gain", ratio, "< 1", detail)


ALL = [
    reference_over_engine,
    paper_over_members,
    lazy_over_slowest,
    agreed_over_members,
    gated_forwards_saved,
    batch_speedup,
    event_loop_gap,
    prefix_reuse_first_word,
    kv_bytes_of_branches,
    outside_forwards,
    memory_growth,
    drafting_gain,
    early_decisions_gain,
    lazy_catch_up_gain,
]
