"""What is held: KV per branch, and the process's memory over many requests."""

from __future__ import annotations

import gc
import os

from adafuse_engine import Engine
from tests.benchmarks import prompts
from tests.benchmarks.bench import Result


def kv_bytes_of_branches(b):
    """The pool only grows, so its size afterwards is its peak; the second answer reuses the first one's prompt."""
    b.empty()
    prompt = prompts.passage_of(b.engine.tokenize, b.size.long)
    held = []
    for branches in (1, 3):
        # Never certain, nothing left out: every member writes all branches in every round.
        done = b.engine.generate(prompt, branches=branches, threshold=1.0, early_decisions=False, max_tokens=4)
        held.append(sum(m.model.runner.cache.bytes for m in b.members))
    b.empty()
    tokens = done.usage.prompt_tokens
    detail = f"{held[1]:,} against {held[0]:,} bytes, prompt of {tokens} tokens; the pool grows in steps"
    return Result.of("kv_bytes_of_branches", held[1] / held[0], "<= 1.05", detail)


def memory_growth(b):
    """On tiny random models: the engine's own bookkeeping is what could grow."""
    from tests.support import tiny

    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
        for i in range(b.size.requests):
            if i == b.size.settled:
                before = resident()
            engine.generate(f"Line {i}:", max_tokens=2, branches=2, max_words=1, max_word_tokens=4)
        growth = resident() - before
    detail = f"MB over requests {b.size.settled} to {b.size.requests}, tiny models"
    return Result.of("memory_growth", growth, "< 10 MB", detail)


def resident():
    """Resident memory of this process in MB (Linux only)."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
