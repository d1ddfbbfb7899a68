"""Tree attention, batching and drafting in narrow types against float32: on CUDA at the shape of a 1B model.

The same checks run on the CPU with small models, which shows that they work. They have not been run on a GPU yet.
"""

import pytest
import torch

from tests.gpu import checks

ON_CPU = [("small", "cpu", torch.float32), ("small", "cpu", torch.bfloat16)]
ON_GPU = [
    pytest.param(shape, "cuda", dtype, marks=pytest.mark.gpu)
    for shape in ("small", "1B")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
PLACES = pytest.mark.parametrize(
    ("shape", "device", "dtype"), [*ON_CPU, *ON_GPU], ids=lambda value: str(value).removeprefix("torch.")
)


@PLACES
def test_trees_equal_plain_forwards_in_float32(shape, device, dtype):
    assert checks.tree_attention(*checks.pair(shape, device, dtype)) < checks.TOLERANCE[dtype]


@PLACES
def test_a_batch_equals_its_parts(shape, device, dtype):
    runner, _ = checks.pair(shape, device, dtype)
    assert checks.batching(runner) < checks.TOLERANCE[dtype]


@PLACES
def test_drafting_changes_no_score(shape, device, dtype):
    worst, compared = checks.drafting(shape, device, dtype)
    assert compared > 20
    assert worst < checks.TOLERANCE[dtype]


def test_the_check_notices_a_wrong_tree(monkeypatch):
    runner, wide = checks.pair("small", "cpu", torch.bfloat16)
    monkeypatch.setattr(checks.Tree, "ancestors", lambda tree, node: [node] if node > 0 else [])
    trees = checks.opened(runner, range(len(checks.TEXTS)))
    runner.run([checks.Feed(tree, *nodes) for tree, nodes in zip(trees, checks.TREES, strict=True)])
    monkeypatch.undo()
    assert checks.against_plain(runner, wide, trees[0], checks.TEXTS[0]) > checks.TOLERANCE[torch.bfloat16]
