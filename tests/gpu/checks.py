"""Correctness of the local engine on any device and in any type, against plain forwards in float32.

Each check returns the largest difference of log-probabilities that it saw, in nats, over tokens that are not
wildly improbable. The models' weights are the same in all types: numbers that the narrow type can hold.
"""

from __future__ import annotations

import torch

from adafuse_engine import Engine
from adafuse_engine.members.local.plain import PlainRunner, plain_logits
from adafuse_engine.members.local.runner import Feed, Runner, Tree, Want
from tests.gpu.models import local_model, member_of, random_llama
from tests.support import tiny

TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""In nats; for spans, per token. The first checks use models whose logits have a standard deviation of about 2."""

SPREAD = 2.0
TEXTS = [list(range(5, 60)), [7, 8, 9], list(range(30, 50)), list(range(200, 290))]
TREES = [((0, 0, 2, 3), (9, 10, 11, 12)), ((0,), (12,)), ((0, 1, 1), (13, 14, 15)), ((0, 0), (16, 17))]
PROMPTS = [
    "The ferry leaves the harbour at",
    "One, two, three, four; five: six. Seven!",
    "def add(a, b):\n    return",
]


def pair(shape: str, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Runner, torch.nn.Module]:
    """A runner in the type to be checked, and the same weights in float32."""
    narrow = random_llama(shape, device, dtype, seed, SPREAD)
    wide = random_llama(shape, device, torch.float32, seed, SPREAD)
    wide.load_state_dict(narrow.state_dict())
    runner = local_model(narrow, shape).runner
    assert not isinstance(runner, PlainRunner), "the self-check at load took the model for one without trees"
    return runner, wide


def tree_attention(runner: Runner, wide: torch.nn.Module) -> float:
    """Trees of several requests in one forward, one path kept, another forward: against plain texts in float32."""
    trees = opened(runner, range(len(TEXTS)))
    runner.run([Feed(tree, *nodes) for tree, nodes in zip(trees, TREES, strict=True)])
    worst = 0.0
    for tree, text in zip(trees, TEXTS, strict=True):
        worst = max(worst, against_plain(runner, wide, tree, text))
    runner.keep(trees[0], [2, 3])
    runner.run([Feed(trees[0], (0, 0), (40, 41))])
    worst = max(worst, against_plain(runner, wide, trees[0], [*TEXTS[0], 10, 11]))
    for tree in trees:
        runner.close(tree)
    return worst


def batching(runner: Runner) -> float:
    """The same trees in one forward and in one each."""
    rows = []
    for groups in ([range(len(TEXTS))], [[i] for i in range(len(TEXTS))]):
        found = []
        for group in groups:
            trees = opened(runner, group)
            runner.run([Feed(tree, *TREES[i]) for tree, i in zip(trees, group, strict=True)])
            found += [row.logits for tree in trees for row in tree.rows[1:]]
            for tree in trees:
                tree.prefix.clear()  # so that the next does not take it over, and computes it itself
                runner.close(tree)
        rows.append(found)
    return max(difference(one, other) for one, other in zip(*rows, strict=True))


def drafting(shape: str, device: str, dtype: torch.dtype) -> tuple[float, int]:
    """Two members with drafting and without: difference per token of what they score, and candidates compared.

    Rounds are compared up to the first with another winner, for rounding may decide a close one.
    """
    members = [
        member_of(local_model(random_llama(shape, device, dtype, seed), shape), f"m{seed}") for seed in (1, 2)
    ]
    worst, compared = 0.0, 0
    with Engine(members=members) as engine:
        for prompt in PROMPTS:
            on, off = (engine.generate(prompt, max_tokens=24, seed=0, drafting=d) for d in (True, False))
            for one, other in zip(on.trace.rounds, off.trace.rounds, strict=False):
                others = {c.text: c.scores for c in other.candidates}
                for candidate in one.candidates:
                    tokens = max(1, len(tiny.byte_level()(candidate.text).input_ids))
                    for name, score in candidate.scores.items():
                        twin = others.get(candidate.text, {}).get(name)
                        if score is not None and twin is not None and min(score, twin) > -12 * tokens:
                            worst, compared = max(worst, abs(score - twin) / tokens), compared + 1
                if one.text != other.text:
                    break
    for member in members:
        member.close()
    return worst, compared


def opened(runner: Runner, which) -> list[Tree]:
    trees = []
    for i in which:
        tree = Tree(Want(3, False, False))
        runner.open(tree, TEXTS[i])
        runner.run([Feed(tree, (), TEXTS[i][tree.reused :], prefill=True)])
        trees.append(tree)
    return trees


def against_plain(runner: Runner, wide: torch.nn.Module, tree: Tree, text: list[int]) -> float:
    worst = 0.0
    for node in range(1, len(tree.tokens)):
        path = [tree.tokens[n] for n in reversed(tree.ancestors(node))]
        worst = max(worst, difference(tree.rows[node].logits, plain_logits(wide, [*text, *path], runner.device)))
    return worst


def difference(row: torch.Tensor, other: torch.Tensor) -> float:
    """Of log-probabilities, over tokens that may be written and are not wildly improbable."""
    allowed = torch.isfinite(row)
    left, right = (torch.log_softmax(x[allowed].double(), 0) for x in (row, other))
    likely = (left > -12) | (right > -12)
    return float((left - right)[likely].abs().max())
