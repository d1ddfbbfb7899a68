"""Slots and what they still hold: prefix reuse in place and by copy, least recently used first."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_engine import Engine
from adafuse_engine.members.local.plain import plain_logits
from adafuse_engine.members.local.runner import Feed, Tree, Want
from adafuse_engine.members.local.slots import Slots, Taken
from tests.support import tiny


def use(slots, ids, answer=()):
    held = []
    taken = slots.take(ids, held)
    held.extend([*ids, *answer])
    return taken


def test_the_same_prompt_again_takes_its_slot_in_place_and_computes_one_token():
    slots = Slots(4)
    first = use(slots, range(100))
    slots.give(first.slot)
    assert use(slots, range(100)) == Taken(first.slot, 99, None)


def test_a_growing_history_is_reused_up_to_where_it_differs():
    slots = Slots(4)
    first = use(slots, range(50), answer=[900, 901])
    slots.give(first.slot)
    assert use(slots, [*range(50), 900, 901, 7, 8]).reused == 52


def test_a_busy_slot_is_copied_from():
    slots = Slots(4)
    first = use(slots, range(60))
    second = use(slots, [*range(60), 5])
    assert second == Taken(1, 60, first.slot)


def test_a_slot_with_much_else_is_copied_from_and_keeps_what_it_holds():
    slots = Slots(4)
    first = use(slots, range(100))
    slots.give(first.slot)
    assert use(slots, [*range(10), 777]) == Taken(1, 10, first.slot)
    assert use(slots, range(100)).reused == 99


def test_short_common_beginnings_are_not_worth_it():
    slots = Slots(4)
    slots.give(use(slots, range(50)).slot)
    assert use(slots, [0, 1, 99]).reused == 0


def test_the_least_recently_used_slot_goes_first_and_there_are_no_more_than_wanted():
    slots = Slots(2)
    slots.give(use(slots, [1] * 20).slot)
    slots.give(use(slots, [2] * 20).slot)
    slots.give(use(slots, [1] * 20).slot)
    slots.give(use(slots, [3] * 20).slot)
    assert slots.count == 2
    assert use(slots, [1] * 20).reused == 19
    assert use(slots, [2] * 20).reused == 0


def test_nothing_is_kept_if_nothing_is_wanted():
    slots = Slots(0)
    slots.give(use(slots, range(50)).slot)
    assert use(slots, range(50)) == Taken(0, 0, None)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), max_size=40), st.integers(0, 4))
@settings(deadline=None)
def test_slots_are_never_shared_and_never_more_than_needed(steps, kept):
    slots, busy, most = Slots(kept), {}, 0
    for kind, length, giving in steps:
        if giving and busy:
            slots.give(busy.popitem()[0])
            continue
        ids = [kind] * length + [9]
        taken = use(slots, ids)
        assert taken.slot not in busy
        assert taken.reused < len(ids)
        assert taken.source != taken.slot
        if taken.source in busy:
            assert busy[taken.source][: taken.reused] == ids[: taken.reused]
        busy[taken.slot] = ids
        most = max(most, len(busy))
    assert slots.count <= max(most, kept, 1)


# ---- with a model


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_reused_tokens_give_the_logits_of_a_fresh_prompt(kind):
    runner = tiny.local_model(kind).runner
    want = Want(2, False, False)
    texts = [list(range(5, 45)), [*range(5, 40), 90, 91], [*range(5, 45), 92, 93]]
    trees = []
    for text in texts:
        tree = Tree(want)
        runner.open(tree, text)
        runner.run([Feed(tree, (), text[tree.reused :], prefill=True)])
        assert tree.prefix == text
        plain = plain_logits(runner.model, text, runner.device)
        seen = torch.isfinite(tree.rows[0].logits)
        assert (tree.rows[0].logits[seen] - plain[seen]).abs().max() < 1e-3
        trees.append(tree)
        if len(trees) == 1:
            continue
        assert tree.reused >= 35


def test_a_second_question_on_the_same_context_reads_only_the_question():
    members = [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]
    context = "The harbour ferry leaves at seven and comes back at nine. " * 12
    with Engine(members=members) as engine:
        first = engine.generate(context + "Question: when?", max_tokens=8)
        second = engine.generate(context + "Question: who goes?", max_tokens=8)
        fresh_members = [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]
        with Engine(members=fresh_members) as fresh:
            expected = fresh.generate(context + "Question: who goes?", max_tokens=8)
    assert second.text == expected.text
    for before, after in zip(first.usage.members, second.usage.members, strict=True):
        assert before.prompt_tokens_reused == 0
        assert after.prompt_tokens - after.prompt_tokens_reused < 30
        assert after.tokens_processed < before.tokens_processed / 2


async def test_requests_at_once_share_what_they_have_in_common_and_answer_as_alone():
    member = tiny.member("llama", "a", 1)
    context = "One, two, three, four; five: six. Seven! " * 8
    prompts = [context + f"Line {i}" for i in range(6)]
    with Engine(members=[tiny.member("llama", "a", 1)]) as alone:
        expected = [alone.generate(p, max_tokens=10).text for p in prompts]
    with Engine(members=[member], max_concurrency=3) as engine:
        done = await asyncio.gather(*(engine.agenerate(p, max_tokens=10) for p in prompts))
    assert [d.text for d in done] == expected
    assert sum(d.usage.members[0].prompt_tokens_reused > 100 for d in done) >= 3


@pytest.mark.parametrize("prefill", [True, False])
def test_a_forward_that_fails_leaves_no_trace(monkeypatch, prefill):
    runner = tiny.local_model("llama").runner
    tree = Tree(Want(2, False, False))
    runner.open(tree, range(5, 20))
    runner.run([Feed(tree, (), list(range(5, 10)), prefill=True)])
    feed = Feed(tree, (), list(range(10, 20)), prefill=True) if prefill else Feed(tree, (0, 1), (30, 31))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_read", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.run([feed])
    assert tree.prefix == list(range(5, 10))
    assert [len(c) for c in (tree.parents, tree.tokens, tree.depths, tree.columns, tree.rows)] == [1] * 5
    [fed] = runner.run([feed])
    text = [*range(5, 20)] if prefill else [*range(5, 10), 30, 31]
    row = tree.rows[0 if prefill else 2]
    plain = plain_logits(runner.model, text, runner.device)
    seen = torch.isfinite(row.logits)
    assert (row.logits[seen] - plain[seen]).abs().max() < 1e-3
    assert len(fed) == (1 if prefill else 2)
