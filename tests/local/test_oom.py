"""Out of memory while running: the one request ends. With a cap on KV requests wait their turn instead."""

import asyncio

import pytest
import torch

from adafuse_engine import Engine, OutOfMemoryError
from adafuse_engine.config import DecodingConfig
from adafuse_engine.members.local.admission import Admission, spare_columns
from adafuse_engine.members.local.memory import is_out_of_memory
from adafuse_engine.members.local.plain import plain_logits
from adafuse_engine.members.local.runner import Feed, Tree, Want
from tests.support import tiny

CPU_MESSAGE = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError(CPU_MESSAGE),
    MemoryError(),
]
PROMPTS = [f"Line {i}: " + "the ferry " * i for i in range(6)]


def check(tree, runner, text):
    """The tree's slot holds the text: one more token gives the logits of a plain forward."""
    runner.run([Feed(tree, (0,), (9,))])
    row, plain = tree.rows[-1], plain_logits(runner.model, [*text, 9], runner.device)
    seen = torch.isfinite(row.logits)
    assert (row.logits[seen] - plain[seen]).abs().max() < 1e-3


def filled(runner, *texts):
    trees = []
    for text in texts:
        trees.append(Tree(Want(2, False, False)))
        runner.open(trees[-1], text)
        runner.run([Feed(trees[-1], (), text[trees[-1].reused :], prefill=True)])
    return trees


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
def test_running_out_of_memory_is_known_by_its_exceptions(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_this_machines_allocator_is_understood():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
async def test_of_a_batch_that_is_too_large_each_request_is_done_alone(error, monkeypatch):
    member = tiny.member("llama", "a", 1)
    runner = member.model.runner
    forward, sizes = runner._forward, []

    def limited(feeds, first):
        sizes.append(len(feeds))
        if len(feeds) > 1:
            raise error
        return forward(feeds, first)

    with Engine(members=[tiny.member("llama", "a", 1)]) as alone:
        expected = [alone.generate(p, max_tokens=8).text for p in PROMPTS]
    monkeypatch.setattr(runner, "_forward", limited)
    with Engine(members=[member]) as engine:
        done = await asyncio.gather(*(engine.agenerate(p, max_tokens=8) for p in PROMPTS))
    assert max(sizes) > 1
    assert [d.text for d in done] == expected


async def test_a_request_that_does_not_fit_alone_ends_and_the_others_go_on(monkeypatch):
    member = tiny.member("llama", "a", 1)
    runner = member.model.runner
    forward = runner._forward

    def limited(feeds, first):
        if any(len(f.tree.prefix) > 200 for f in feeds):
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")
        return forward(feeds, first)

    monkeypatch.setattr(runner, "_forward", limited)
    with Engine(members=[member]) as engine:
        prompts = [*PROMPTS[:3], "word " * 300, *PROMPTS[3:]]
        done = await asyncio.gather(*(engine.agenerate(p, max_tokens=8) for p in prompts), return_exceptions=True)
        failed = done.pop(3)
        assert isinstance(failed, OutOfMemoryError)
        assert "'a'" in str(failed)
        assert "CUDA out of memory;" in str(failed)
        assert "bfloat16" in str(failed)
        assert [d.text for d in done] == [engine.generate(p, max_tokens=8).text for p in PROMPTS]
        assert await member.model.worker.call(lambda: runner.slots.busy) == 0


@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_growth_that_fails_half_way_leaves_the_pool_as_it_was(tensor, monkeypatch):
    runner = tiny.local_model("llama").runner
    [tree] = filled(runner, list(range(5, 40)))
    cache = runner.cache
    before = (cache.slots, cache.length, cache.bytes)
    make, calls = torch.Tensor.new_zeros, []

    def failing(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == tensor:
            raise RuntimeError(CPU_MESSAGE)
        return make(self, *args, **kwargs)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(torch.Tensor, "new_zeros", failing)
        with pytest.raises(RuntimeError):
            cache.reserve(4, 1000)
    assert (cache.slots, cache.length, cache.bytes) == before
    check(tree, runner, range(5, 40))


def test_a_slot_that_there_was_no_memory_for_is_not_given_to_the_next_request(monkeypatch):
    runner = tiny.local_model("llama").runner
    [first] = filled(runner, list(range(5, 40)))
    second = Tree(Want(2, False, False))
    with monkeypatch.context() as patch:
        patch.setattr(runner.cache, "resize", lambda *args: (_ for _ in ()).throw(MemoryError()))
        runner.open(second, [100, 101])
        with pytest.raises(MemoryError):
            runner.run([Feed(second, (), [100, 101], prefill=True)])
        check(first, runner, range(5, 40))
        runner.close(second)
    assert runner.slots.count == 1


def test_a_prefix_that_there_is_no_room_to_copy_is_read_again(monkeypatch):
    runner = tiny.local_model("llama").runner
    text = list(range(5, 60))
    filled(runner, text)
    tree = Tree(Want(2, False, False))
    with monkeypatch.context() as patch:
        patch.setattr(runner.cache, "resize", lambda *args: (_ for _ in ()).throw(MemoryError()))
        runner.open(tree, text)
    assert (tree.reused, tree.prefix) == (0, [])
    runner.run([Feed(tree, (), text, prefill=True)])
    check(tree, runner, text)


def test_shedding_keeps_running_requests_and_gives_up_what_is_idle():
    runner = tiny.local_model("llama").runner
    texts = [[k, *range(k + 5, k + 40)] for k in (10, 60, 110, 160)]
    trees = filled(runner, *texts)
    runner.close(trees[0])
    runner.close(trees[2])
    before = runner.cache.bytes
    runner.shed()
    assert runner.cache.slots == runner.slots.count == 2
    assert runner.cache.bytes == before // 2
    assert {trees[1].slot, trees[3].slot} == {0, 1}
    check(trees[1], runner, texts[1])
    check(trees[3], runner, texts[3])
    runner.close(trees[3])
    runner.close(trees[1])
    [again] = filled(runner, [*texts[3], 7])
    assert again.reused == len(texts[3])


# ---- a cap on keys and values


def capped(columns, seed=1, kind="llama"):
    """A member whose pool may have so many columns, all slots together, and the pool's sizes over time."""
    member = tiny.member(kind, "a", seed)
    cache = member.model.runner.cache
    column = cache.bytes // (cache.slots * cache.length)
    member.model.admission = Admission(member.model.runner, columns * column)
    sizes = []
    resize = cache.resize
    cache.resize = lambda *args: (resize(*args), sizes.append(cache.slots * cache.length))[0]
    return member, sizes


@pytest.mark.parametrize("columns", [340, 700, 1300])
async def test_with_a_cap_requests_wait_in_order_of_arrival_and_answer_the_same(columns):
    prompts = [*PROMPTS, "The ferry leaves " * 4, *PROMPTS]
    with Engine(members=[tiny.member("llama", "a", 1)]) as alone:
        expected = [alone.generate(p, max_tokens=10).text for p in prompts]
    member, sizes = capped(columns)
    runner = member.model.runner
    opened, busy = [], []
    open_ = runner.open

    def watched(tree, ids):
        opened.append(tuple(ids))
        open_(tree, ids)
        busy.append(runner.slots.busy)

    runner.open = watched
    with Engine(members=[member], max_concurrency=len(prompts)) as engine:
        done = await asyncio.gather(*(engine.agenerate(p, max_tokens=10) for p in prompts))
    assert [d.text for d in done] == expected
    assert opened == [tuple(member.prompt_ids(p)) for p in prompts]
    assert max(sizes, default=256) <= columns
    assert max(busy) < len(prompts)


def test_a_prompt_that_can_never_fit_is_an_error_at_once():
    member, _ = capped(400)
    with Engine(members=[member]) as engine:
        with pytest.raises(OutOfMemoryError, match="kv_max_bytes allows it 400 tokens"):
            engine.generate("The ferry leaves. " * 60)
        assert member.model.runner.slots.busy == 0
        assert engine.generate("The ferry", max_tokens=4).text


def test_the_pool_never_outgrows_its_cap():
    cache = tiny.local_model("llama").runner.cache
    cache.most = 1000
    with torch.inference_mode():
        cache.reserve(3, 300)
        assert (cache.slots, cache.length) == (3, 333)
        with pytest.raises(MemoryError, match="kv_max_bytes"):
            cache.reserve(4, 300)
        with pytest.raises(MemoryError, match="kv_max_bytes"):
            cache.reserve(1, 340)
    assert (cache.slots, cache.length) == (3, 333)


def test_an_answer_that_would_outgrow_the_cap_ends_by_length():
    member, sizes = capped(320)
    with Engine(members=[member]) as engine:
        done = engine.generate("The ferry", max_tokens=2000)
    assert done.finish_reason in ("length", "stop")
    assert max(sizes, default=0) <= 320


async def test_a_request_that_is_cancelled_while_it_waits_makes_way():
    member, _ = capped(300)
    with Engine(members=[member]) as engine:
        first = asyncio.create_task(engine.agenerate("The ferry", max_tokens=1000))
        async with asyncio.timeout(20):
            while not member.model.runner.slots.busy:
                await asyncio.sleep(0.001)
            second = asyncio.create_task(engine.agenerate("One, two", max_tokens=4))
            third = asyncio.create_task(engine.agenerate("One, two, three", max_tokens=4))
            while len(member.model.admission._waiting) < 2:
                await asyncio.sleep(0.001)
            second.cancel()
            first.cancel()
            assert (await third).text is not None
        await asyncio.gather(first, second, return_exceptions=True)


async def test_two_members_on_one_model_never_wait_for_each_other():
    settings = DecodingConfig()
    member, sizes = capped(2 * (spare_columns(settings) + 60))
    views = [tiny.LocalMember(tiny.MemberConfig(model="m", name=n), member.model, progress=False) for n in "bc"]
    member.close()
    prompts = [{"b": f"One {i}", "c": f"The ferry {i}" + " leaves" * i} for i in range(5)]
    with Engine(members=views) as engine:
        async with asyncio.timeout(60):
            done = await asyncio.gather(*(engine.agenerate(p, max_tokens=6) for p in prompts))
    assert len(done) == 5
    assert max(sizes) <= 2 * (spare_columns(settings) + 60)


async def test_two_models_with_caps_never_wait_for_each_other():
    members = [capped(300, 1)[0], capped(300, 2, "gemma")[0]]
    members[1].name = "b"
    with Engine(members=members) as engine:
        async with asyncio.timeout(60):
            done = await asyncio.gather(*(engine.agenerate(p, max_tokens=6) for p in PROMPTS))
    assert len(done) == len(PROMPTS)


def test_the_cap_is_an_engine_setting_for_each_model(tmp_path):
    folder = tiny.save("llama", tmp_path / "m")
    with Engine.from_models([str(folder)], kv_max_bytes=200_000, progress=False) as engine:
        assert engine.generate("The ferry", max_tokens=4).text
        [member] = engine._members
        assert 0 < member.model.runner.cache.bytes <= 200_000
