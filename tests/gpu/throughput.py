"""Tokens per second on random models of 1B and 8B shape.

``python tests/gpu/throughput.py [--quick] [--device cuda] [--json FILE]``

Each member alone (greedy), and both as an ensemble with the default preset, the paper's, and a gate with lazy
catch-up; one request, and eight at once. Made to end within five minutes on one GPU: what there is no time for
is left out, and the table says so. `--device cpu` takes tiny models, to show that it runs.

Random members never agree, so drafts are never accepted and nothing is decided early: members that know the
same language do better. Their logits are spread so that about half of the tokens are certain.

It has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

SECONDS = 240
MODES = {
    "default": {"preset": "default"},
    "paper": {"preset": "paper"},
    "gated, lazy": {"preset": "default", "gate": "any_certain", "catch_up": "lazy"},
}
# Certain of everything: the greedy words alone.
GREEDY = {"gate": "any_certain", "threshold": 0.0}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few tokens of each: shows that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    shapes = ("tiny", "small") if on_cpu else ("1B", "8B")
    dtype = torch.float32 if on_cpu else torch.bfloat16
    results = run(shapes, arguments.device, dtype, tokens=8 if arguments.quick else 64)
    table(results, arguments.device if on_cpu else torch.cuda.get_device_name(arguments.device))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


def run(shapes, device, dtype, tokens):
    """Results as dicts; ``tokens_per_second`` is None where time ran out."""
    from adafuse_engine import Engine
    from tests.gpu.models import local_model, member_of, random_llama

    start = perf_counter()
    models = [
        local_model(random_llama(shape, device, dtype, seed), shape) for seed, shape in enumerate(shapes, start=1)
    ]
    members = [member_of(model, shape) for model, shape in zip(models, shapes, strict=True)]
    alone = {f"{m.name} alone, greedy": ([m], GREEDY) for m in members}
    together = {f"both, {name}": (members, options) for name, options in MODES.items()}
    results = []
    for name, (chosen, options) in {**alone, **together}.items():
        with Engine(members=chosen) as engine:
            engine.generate("Warm up. " * 20, max_tokens=4, **options)
            for requests in (1, 8):
                rate = None
                if perf_counter() - start < SECONDS:
                    rate = measure(engine, requests, tokens, options)
                results.append({"name": name, "requests": requests, "tokens_per_second": rate})
    for member in members:
        member.close()
    return results


def measure(engine, requests, tokens, options):
    """Tokens of all answers, by the first member's count, per second; reading the prompts is part of it."""
    text = "The ferry leaves the harbour at seven in the morning and comes back at nine. " * 12
    # Different from the first word on, so that no prompt is partly known.
    prompts = [f"{requests} {i} {sorted(options.items())} {text}" for i in range(requests)]
    begin = perf_counter()
    done = engine.generate_batch(prompts, max_tokens=tokens, **options)
    return sum(c.usage.completion_tokens for c in done) / (perf_counter() - begin)


def table(results, where):
    print(f"tokens per second on {where}\n\n{'':28}{'1 request':>12}{'8 at once':>12}")
    rates = {(r["name"], r["requests"]): r["tokens_per_second"] for r in results}
    for name in dict.fromkeys(r["name"] for r in results):
        shown = ("no time" if (rate := rates[name, n]) is None else f"{rate:.1f}" for n in (1, 8))
        print(f"{name:28}" + "".join(f"{text:>12}" for text in shown))


if __name__ == "__main__":
    main()
