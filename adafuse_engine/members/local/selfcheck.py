"""A check at load: that a model gives the same logits for a tree as for plain texts."""

from __future__ import annotations

import logging

import torch

from adafuse_engine.members.local.memory import is_out_of_memory
from adafuse_engine.members.local.plain import plain_logits
from adafuse_engine.members.local.runner import Feed, Runner, Tree, Want

__all__ = ["tree_attention_works"]

log = logging.getLogger("adafuse_engine")

# Largest difference of log-probabilities in nats, over tokens that are not wildly improbable.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


def tree_attention_works(runner: Runner) -> bool:
    """Feed a prefix in two pieces and a tree of four tokens; compare each with a forward of its own.

    Raises what the device raises where memory is too short for that.
    """
    if not runner.masks.supported:
        return False
    usable = [i for i in range(4000) if i < runner.size][5:] or [0]
    step = max(1, len(usable) // 24)
    ids = usable[::step][:24]
    prefix, (a, b, c, d) = ids[:-4], ids[-4:]
    tree = Tree(Want(2, False, False))
    try:
        runner.open(tree, ())
        runner.run([Feed(tree, (), prefix[:9], prefill=True)])
        runner.run([Feed(tree, (), prefix[9:], prefill=True)])
        # Siblings first and the second sibling's child last: rows must not see their siblings.
        runner.run([Feed(tree, (0, 0, 0, 2), (a, b, c, d))])
        texts = [[*prefix, a], [*prefix, b], [*prefix, c], [*prefix, b, d]]
        worst = 0.0
        for node, text in enumerate(texts, start=1):
            row = tree.rows[node]
            if row is None:
                return False
            worst = max(worst, _difference(row.logits, plain_logits(runner.model, text, runner.device)))
        runner.keep(tree, [2, 4])
        runner.run([Feed(tree, (0,), (a,))])
        row = tree.rows[1]
        text = [*prefix, b, d, a]
        if row is not None:
            worst = max(worst, _difference(row.logits, plain_logits(runner.model, text, runner.device)))
    except Exception as error:
        if is_out_of_memory(error):
            raise  # says nothing about the model
        log.info("tree attention: %s: %s", type(error).__name__, error)
        return False
    finally:
        tree.prefix.clear()  # nothing here is worth keeping for later prompts
        runner.close(tree)
    return worst <= TOLERANCE.get(runner.model.dtype, 0.5)


def _difference(tree: torch.Tensor, plain: torch.Tensor) -> float:
    allowed = torch.isfinite(tree)
    left = torch.log_softmax(tree[allowed], 0)
    right = torch.log_softmax(plain.to(tree.device)[allowed], 0)
    likely = (left > -12) | (right > -12)
    worst = (left - right)[likely].abs().max()
    return float(worst) if torch.isfinite(worst) else float("inf")
