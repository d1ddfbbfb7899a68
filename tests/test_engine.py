"""The engine's faces: threads, tasks, streams, batches, cancelling, closing, errors."""

import asyncio
import contextlib
import threading

import pytest

from adafuse_engine import (
    EmptyPromptError,
    Engine,
    EngineClosedError,
    InvalidArgumentError,
    MemberError,
    Message,
    UnknownArgumentError,
)
from adafuse_engine.testing import ScriptedMember

ANSWER = " one two three four five six seven eight nine ten"


def make(answer=ANSWER, **options):
    a = ScriptedMember("a", answer, **options)
    return Engine(members=[a, ScriptedMember("b", answer, confidence=0.4)]), a


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_all_four_roads_give_the_same_answer():
    engine, _ = make()
    with engine:
        done = engine.generate("x")
        again = await engine.agenerate("x")
        streamed = list(engine.stream("x"))
        astreamed = [c async for c in engine.astream("x")]
    assert done.text == again.text == ANSWER
    for chunks in (streamed, astreamed):
        assert "".join(c.text for c in chunks) == ANSWER
        assert [c for c in chunks if c.completion] == [chunks[-1]]
        assert chunks[-1].completion.text == ANSWER
        assert chunks[-1].completion.usage.completion_tokens == done.usage.completion_tokens
        assert len(chunks) > 3


def test_a_stream_gives_text_as_it_is_decided():
    gate = threading.Semaphore(0)

    def hold(number):
        if number > 6:
            gate.acquire(timeout=10)

    engine, _ = make(on_forward=hold)
    with engine:
        stream = engine.stream("x", max_words=1)
        assert next(stream).text == " one"
        for _ in range(100):
            gate.release()
        assert "".join(c.text for c in stream) == ANSWER.removeprefix(" one")


def test_chunks_tell_confidence_and_whether_scores_decided():
    engine, _ = make()
    with engine:
        chunks = list(engine.stream("x"))
    assert all(0 < c.confidence <= 1 for c in chunks)
    assert chunks[0].fused
    assert [c.round for c in chunks[:-1]] == sorted({c.round for c in chunks[:-1]})


def test_many_threads_may_call_one_engine():
    engine = Engine(
        members=[ScriptedMember(n, lambda p: f" answer to {p}", confidence=c) for n, c in (("a", 0.9), ("b", 0.3))]
    )
    texts = {}

    def ask(i):
        texts[i] = engine.generate(f"question {i}").text

    with engine:
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(timeout=30)
    assert texts == {i: f" answer to question {i}" for i in range(20)}


def test_a_batch_keeps_order_and_a_failing_prompt_fails_alone_if_asked():
    engine = Engine(members=[ScriptedMember("a", lambda p: f" re {p}")])
    with engine:
        assert [c.text for c in engine.generate_batch(["1", "2", "3"])] == [" re 1", " re 2", " re 3"]
        mixed = engine.generate_batch(["1", "", "3"], return_exceptions=True)
        assert [getattr(m, "text", type(m)) for m in mixed] == [" re 1", EmptyPromptError, " re 3"]
        with pytest.raises(EmptyPromptError):
            engine.generate_batch(["1", "", "3"])
        assert engine.generate_batch([]) == []


async def test_cancelling_a_task_stops_the_members_and_frees_their_sessions():
    engine, a = make(" word" * 5000, delay=0.01)
    with engine:
        task = asyncio.create_task(engine.agenerate("x", max_tokens=5000))
        await until(lambda: a.forwards > 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: a.open_sessions == 0)
        seen = a.forwards
        await asyncio.sleep(0.1)
        assert a.forwards <= seen + 1


async def test_closing_an_async_stream_stops_the_members():
    engine, a = make(" word" * 5000, delay=0.005)
    with engine:
        stream = engine.astream("x", max_tokens=5000)
        await anext(stream)
        await stream.aclose()
        await until(lambda: a.open_sessions == 0)


async def test_closing_a_stream_stops_the_members():
    engine, a = make(" word" * 5000, delay=0.005)
    with engine:
        stream = engine.stream("x", max_tokens=5000)
        next(stream)
        stream.close()
        await until(lambda: a.open_sessions == 0)
        assert engine.generate("x", max_tokens=3).text.startswith(" word")


async def test_leaving_a_stream_loop_early_frees_it():
    engine, a = make(" word" * 5000, delay=0.005)
    with engine:
        async with contextlib.aclosing(engine.astream("x", max_tokens=5000)) as stream:
            async for _ in stream:
                break
        await until(lambda: a.open_sessions == 0)


async def test_a_deadline_of_the_caller_is_a_cancellation():
    engine, a = make(" word" * 5000, delay=0.005)
    with engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await engine.agenerate("x", max_tokens=5000)
        await until(lambda: a.open_sessions == 0)


async def test_async_calls_leave_the_event_loop_free():
    engine, _ = make(delay=0.02)
    ticks = 0
    with engine:
        task = asyncio.create_task(engine.agenerate("x"))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.005)
    assert ticks > 5


async def test_a_consumer_that_stops_reading_holds_nothing():
    engine, a = make()
    with engine:
        stream = engine.astream("x")
        await anext(stream)
        await until(lambda: a.open_sessions == 0)
        rest = [c.text async for c in stream]
        assert "".join(rest) in ANSWER


async def test_requests_beyond_the_limit_wait_in_order():
    order = []
    member = ScriptedMember("a", lambda p: order.append(p) or " ok", delay=0.01)
    with Engine(members=[member], max_concurrency=2) as engine:
        tasks = [asyncio.create_task(engine.agenerate(str(i))) for i in range(6)]
        await asyncio.gather(*tasks)
    assert order == [str(i) for i in range(6)]


def test_closing_ends_running_calls_and_later_ones_with_a_clear_error():
    engine, a = make(" word" * 5000, delay=0.01)
    errors = []

    def ask():
        try:
            engine.generate("x", max_tokens=5000)
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while a.forwards < 3:
        pass
    engine.close()
    thread.join(timeout=10)
    assert len(errors) == 1
    with pytest.raises(EngineClosedError, match="make a new Engine"):
        engine.generate("x")
    with pytest.raises(EngineClosedError):
        next(engine.stream("x"))
    engine.close()
    assert engine.closed
    assert a.open_sessions == 0


def test_an_engine_that_is_dropped_stops_its_thread():
    import gc

    before = threading.active_count()
    engine, _ = make()
    assert engine.generate("x").text == ANSWER
    del engine
    gc.collect()
    assert threading.active_count() <= before


# ---- prompts


def test_each_member_may_have_its_own_prompt():
    a, b = ScriptedMember("a", " ok"), ScriptedMember("b", " ok")
    with Engine(members=[a, b]) as engine:
        engine.generate({"b": "for b", "a": [Message("user", "for a")]})
    assert a.prompts == ["user: for a\nassistant:"]
    assert b.prompts == ["for b"]


def test_prompts_per_member_name_every_member_and_no_other():
    engine, _ = make()
    with engine:
        with pytest.raises(InvalidArgumentError, match="no prompt for 'b'"):
            engine.generate({"a": "x"})
        with pytest.raises(UnknownArgumentError, match=r"'bb'.*'b'"):
            engine.generate({"a": "x", "bb": "x"})


@pytest.mark.parametrize("prompt", ["", "  \n", [], {"a": "x", "b": " "}])
def test_an_empty_prompt_is_refused(prompt):
    engine, _ = make()
    with engine, pytest.raises(EmptyPromptError):
        engine.generate(prompt)


@pytest.mark.parametrize("prompt", [3, None, b"bytes"])
def test_a_prompt_of_another_type_is_refused(prompt):
    engine, _ = make()
    with engine, pytest.raises(InvalidArgumentError, match="prompt"):
        engine.generate(prompt)


# ---- arguments


def test_an_unknown_argument_is_refused_before_anything_runs():
    engine, a = make()
    with engine:
        for call in (engine.generate, lambda *x, **k: next(engine.stream(*x, **k)), engine.generate_batch):
            with pytest.raises(UnknownArgumentError, match=r"'max_new_tokens'"):
                call("x", max_new_tokens=5)
    assert a.forwards == 0


def test_settings_of_the_engine_hold_unless_a_call_changes_them():
    engine, _ = make()
    with engine:
        assert engine.generate("x", max_tokens=1).finish_reason == "length"
        assert engine.generate("x").text == ANSWER
        assert engine.check_options(threshold=0.2).threshold == 0.2


@pytest.mark.parametrize("weights", [[1], [0, 0], [-1, 1], [float("nan"), 1]])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(InvalidArgumentError, match="weights"):
        Engine(members=[ScriptedMember("a"), ScriptedMember("b")], weights=weights)


def test_no_members_and_two_of_one_name_are_refused():
    with pytest.raises(InvalidArgumentError, match="at least one member"):
        Engine(members=[])
    with pytest.raises(InvalidArgumentError, match="called 'a'"):
        Engine(members=[ScriptedMember("a"), ScriptedMember("a")])
    with pytest.raises(InvalidArgumentError, match="config"):
        Engine()


def test_usage_counts_tokens_by_the_first_member_and_costs_by_member():
    engine, _ = make()
    with engine:
        usage = engine.generate("twelve chars").usage
        assert usage.prompt_tokens == engine.count_tokens("twelve chars") == 4
        assert usage.completion_tokens == engine.count_tokens(ANSWER)
    assert [m.name for m in usage.members] == ["a", "b"]
    assert all(m.forward_passes > 1 for m in usage.members)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_error_of_a_stream_reaches_its_reader():
    def broken(number):
        if number > 4:
            raise MemberError("on purpose")

    engine, _ = make(on_forward=broken)
    with engine, pytest.raises(MemberError, match="on purpose"):
        list(engine.stream("x"))
