"""Service levels: the reckoning by itself, and in the loop on scripted members with a clock of their own."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_engine import DecodingConfig, Engine, InvalidArgumentError
from adafuse_engine.decoding import decode
from adafuse_engine.service import EASE, FLOOR, Governor, Progress, ladder
from adafuse_engine.testing import ScriptedMember
from adafuse_engine.trace import Trace
from adafuse_engine.voices import Voice

TEXT = " ".join(["", *(f"word{n}" for n in range(120))])
LIMITS = ["deadline_s", "words_per_second", "max_forward_passes"]


class Clock:
    """Time goes on by ``cost`` with each forward of a member, and by nothing else."""

    def __init__(self, cost=1.0):
        self.time, self.cost = 1000.0, cost

    def __call__(self):
        return self.time

    def tick(self, number):
        self.time += self.cost


async def write(members, clock, weights=None, **options):
    """What the members write under a governor on this clock; the result, the trace and the sessions' usage."""
    config = DecodingConfig(**options)
    governor = Governor(config, clock)
    sessions = [await m.open("x", config) for m in members]
    weights = weights or [1 / len(members)] * len(members)
    voices = [Voice(m.name, w, s) for m, w, s in zip(members, weights, sessions, strict=True)]
    trace = Trace(tuple(m.name for m in members), tuple(weights), 1, {})
    written = await decode(voices, config, trace, governor=governor)
    for session in sessions:
        await session.close()
    return written, trace, [s.usage() for s in sessions]


def two(clock=None, answer=TEXT, other=None, sure=0.6, unsure=0.4):
    tick = clock.tick if clock else None
    return (
        ScriptedMember("a", answer, confidence=sure, on_forward=tick),
        ScriptedMember("b", other or answer, confidence=unsure, on_forward=tick),
    )


def modes(trace):
    """The steps in order, repetitions left out: (mode, threshold, branches), or None for the request's own."""
    steps = [r.service and tuple(r.service[k] for k in ("mode", "threshold", "branches")) for r in trace.rounds]
    return [step for n, step in enumerate(steps) if n == 0 or step != steps[n - 1]]


# ---- the ladder


def test_steps_lower_the_threshold_then_the_branches_then_the_members():
    steps = [(s.gate, s.threshold, s.branches) for s in ladder(DecodingConfig(threshold=0.7))]
    assert steps == [
        ("never", 0.7, 3),
        ("any_certain", 0.7, 3),
        ("any_certain", 0.5, 3),
        ("any_certain", 0.3, 3),
        ("any_certain", 0.3, 1),
        ("any_certain", 0.0, 1),
    ]


def test_what_is_set_already_is_no_step_and_a_low_threshold_stays():
    steps = ladder(DecodingConfig(gate="any_certain", catch_up="lazy", threshold=0.2, branches=1))
    assert [s.threshold for s in steps] == [0.2, 0.0]
    assert all(s.catch_up == "lazy" for s in ladder(DecodingConfig())[1:])


@given(st.floats(0, 1), st.integers(1, 8), st.sampled_from(["never", "any_certain"]))
def test_every_step_asks_for_no_more_than_the_one_before(threshold, branches, gate):
    steps = ladder(DecodingConfig(threshold=threshold, branches=branches, gate=gate))
    assert all(a.threshold >= b.threshold and a.branches >= b.branches for a, b in pairwise(steps))
    assert all(s.threshold >= min(FLOOR, threshold) for s in steps[:-1])


# ---- the reckoning


def governed(clock=None, members=2, **limits):
    governor = Governor(config := DecodingConfig(**limits), clock or Clock())
    governor.begin(config, members)
    return governor


START = Progress(tokens=0, words=0, forwards=2)


def rounds(governor, clock, seconds, count, start=START, forwards=4):
    """Plans of ``count`` rounds that each take so long and write two words of two tokens."""
    plans = []
    for n in range(count):
        plans.append(
            governor.plan(Progress(start.tokens + 4 * n, start.words + 2 * n, start.forwards + forwards * n))
        )
        clock.time += seconds
    return plans


@pytest.mark.parametrize("limits", [{"deadline_s": 100}, {"words_per_second": 1}])
def test_while_there_is_time_nothing_changes(limits):
    clock = Clock()
    plans = rounds(governed(clock, **limits), clock, 0.1, 20)
    assert all(p.report is None for p in plans)


@pytest.mark.parametrize("limits", [{"deadline_s": 100}, {"words_per_second": 1}])
def test_too_slow_goes_down_one_step_a_round(limits):
    clock = Clock()
    plans = rounds(governed(clock, **limits), clock, 2.5, 6)
    steps = [p.settings for p in plans]
    assert steps == ladder(DecodingConfig(**limits))
    assert plans[-1].single
    assert {p.report["because"] for p in plans[1:]} == set(limits)


def test_a_deadline_that_is_past_asks_for_the_cheapest_at_once_and_for_good():
    clock = Clock()
    governor = governed(clock, deadline_s=5)
    clock.time += 6
    plans = rounds(governor, clock, 0.001, 30)
    assert all(p.single for p in plans)


def test_a_longer_text_to_come_presses_more():
    def first_lowered(max_tokens):
        clock = Clock()
        plans = rounds(governed(clock, deadline_s=60, max_tokens=max_tokens), clock, 1, 20)
        return next((n for n, p in enumerate(plans) if p.report), 99)

    assert first_lowered(1000) < first_lowered(60) == 99


@given(st.floats(1, 2000), st.floats(1, 2000))
@settings(deadline=None)
def test_a_shorter_deadline_never_lets_the_first_rounds_cost_more(one, other):
    def steps(deadline):
        clock = Clock()
        plans = rounds(governed(clock, deadline_s=deadline), clock, 3, 6)
        return [ladder(DecodingConfig(deadline_s=deadline)).index(p.settings) for p in plans]

    short, long = sorted([one, other])
    assert all(a >= b for a, b in zip(steps(short), steps(long), strict=True))


def test_regained_pace_is_given_back_step_by_step():
    clock = Clock()
    governor = governed(clock, words_per_second=1)
    assert rounds(governor, clock, 2.5, 6)[-1].single
    plans = rounds(governor, clock, 0.2, 80, Progress(24, 12, 26))
    steps = [ladder(DecodingConfig(words_per_second=1)).index(p.settings) for p in plans]
    assert steps[-1] == 0
    assert all(after - before in (-1, 0) for before, after in pairwise(steps))


def test_between_too_much_and_little_enough_it_stays_where_it_is():
    clock = Clock()
    governor = governed(clock, words_per_second=1)
    rounds(governor, clock, 3, 3)
    load = (EASE + 1) / 2
    plans = rounds(governor, clock, 2 * load, 3, Progress(12, 6, 14))
    assert all(p.report for p in plans)


# ---- in the loop


async def test_a_governor_that_sees_no_pressure_changes_no_round():
    plain, plain_trace, _ = await write(two(), Clock())
    free, trace, _ = await write(two(), Clock(), deadline_s=1e9, words_per_second=1e-9, max_forward_passes=10**9)
    assert free == plain
    assert trace.rounds == plain_trace.rounds


def test_without_limits_there_is_no_governor_and_nothing_in_the_trace():
    assert Governor.of(DecodingConfig()) is None
    assert all(Governor.of(DecodingConfig(**{name: 1})) for name in LIMITS)
    with Engine(members=two()) as e:
        assert {r.service for r in e.generate("x").trace.rounds} == {None}


async def test_growing_pressure_takes_every_step_in_turn():
    clock = Clock()
    written, trace, _ = await write(two(clock), clock, max_tokens=400, deadline_s=300)
    assert written.text == TEXT
    assert modes(trace) == [
        None,
        ("gated", 0.7, 3),
        ("gated", 0.5, 3),
        ("gated", 0.3, 3),
        ("gated", 0.3, 1),
        ("single", 0.0, 1),
    ]


async def test_a_single_member_writes_alone_while_the_others_do_nothing():
    clock = Clock(cost=100)
    written, trace, usage = await write(two(clock), clock, deadline_s=1)
    assert written.text == TEXT
    assert written.finish_reason == "stop"
    assert {r.leader for r in trace.rounds} == {"a"}
    assert not any(r.fused for r in trace.rounds)
    assert usage[1].forward_passes == 1


def test_past_the_deadline_a_request_goes_on_to_the_end_of_its_text():
    with Engine(members=two()) as e:
        done = e.generate("x", deadline_s=1e-9)
    assert (done.text, done.finish_reason) == (TEXT, "stop")
    assert all(r.service["because"] == "deadline_s" for r in done.trace.rounds)


async def test_the_heaviest_of_equally_fast_members_leads_and_never_one_without_a_vote():
    for weights, leader in [([0.2, 0.8], "b"), ([0.8, 0.2], "a"), ([0.5, 0.5], "a"), ([0.0, 1.0], "b")]:
        clock = Clock(cost=100)
        members = two(clock, " yes it is", " no it was")
        written, trace, _ = await write(members, clock, weights, deadline_s=1)
        assert {r.leader for r in trace.rounds} == {leader}
        assert written.text == {"a": " yes it is", "b": " no it was"}[leader]


async def test_the_fastest_member_leads_whatever_the_weights():
    class Slow(ScriptedMember):
        async def open(self, prompt, settings):
            session = await super().open(prompt, settings)
            session._sequence.pace = 2.0
            return session

    clock = Clock(cost=100)
    members = [Slow("slow", " yes"), ScriptedMember("fast", " no", on_forward=clock.tick)]
    written, _, _ = await write(members, clock, [0.9, 0.1], deadline_s=1)
    assert written.text == " no"


async def test_members_fuse_again_when_the_machine_is_fast_again():
    clock = Clock(cost=2.0)
    a, b = two(clock)
    plain = a._on_forward

    def faster(number):
        plain(number)
        if number > 60:
            clock.cost = 0.001

    a._on_forward = faster
    written, trace, usage = await write([a, b], clock, words_per_second=0.4)
    assert written.text == TEXT
    assert any(r.service and r.service["mode"] == "single" for r in trace.rounds)
    assert trace.rounds[-1].service is None
    assert set(trace.rounds[-1].confidence) == {"a", "b"}
    assert usage[1].forward_passes > 1


# ---- the budget


@given(left=st.integers(0, 200), max_words=st.integers(1, 5), cap=st.integers(1, 40))
def test_the_cheapest_step_has_forwards_to_catch_up_and_for_words_of_any_length(left, max_words, cap):
    governor = governed(Clock(), deadline_s=1, max_forward_passes=1000, max_words=max_words, max_word_tokens=cap)
    governor._clock.time += 2
    plan = governor.plan(Progress(0, 0, 1000 - left))
    if left <= 4:
        assert plan is None
    else:
        assert 1 + plan.settings.max_words * (plan.settings.max_word_tokens + 3) <= left


@given(
    budget=st.integers(1, 400),
    members=st.integers(1, 3),
    sure=st.sampled_from([0.1, 0.5, 0.9]),
    gate=st.sampled_from(["never", "any_certain"]),
    catch_up=st.sampled_from(["eager", "lazy"]),
    fusion=st.sampled_from(["mean_nll", "word_posterior", "vote"]),
    agree=st.booleans(),
    long=st.sampled_from(["", "x" * 30, "你好世界🎉"]),
    cheap=st.booleans(),
    max_words=st.integers(1, 4),
    max_word_tokens=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(deadline=None, max_examples=200)
async def test_the_budget_is_never_passed_and_hardly_any_of_it_is_wasted(
    budget, members, sure, agree, long, cheap, **options
):
    text = TEXT[:200] + f" {long} {long} " + TEXT[200:]
    answers = [text, text if agree else text.replace("word", "other"), text]
    made = [ScriptedMember(n, answers[i], confidence=sure) for i, n in enumerate("abc"[:members])]
    for member in made if cheap else ():
        member.encode = lambda data: list(data)
    written, trace, usage = await write(
        made, Clock(), max_forward_passes=budget, max_tokens=2000, seed=1, drafting=agree, **options
    )
    used = sum(u.forward_passes for u in usage)
    assert used <= max(budget, members)
    if written.finish_reason == "length":
        assert used >= budget - 4
    assert "".join(r.text for r in trace.rounds).startswith(written.text)
    if agree and sure == 0.9 and not options["temperature"]:
        assert text.startswith(written.text)


async def test_a_member_that_cannot_write_the_leaders_words_does_not_break_the_budget():
    for budget in range(2, 120):
        a, b = two()
        b.can_write = lambda data: b"word9" not in data
        written, _, usage = await write(
            [a, b], Clock(), max_forward_passes=budget, max_tokens=1000, max_words=1, branches=2
        )
        assert sum(u.forward_passes for u in usage) <= budget
        assert TEXT.startswith(written.text[: TEXT.index("word9")])


@pytest.mark.parametrize("confidence", [0.2, 0.6])
async def test_being_late_does_not_fail_a_text_that_more_branches_can_write(confidence):
    def without_word9():
        members = two(clock := Clock(cost=100), sure=confidence, unsure=confidence)
        members[1].can_write = lambda data: b"word9" not in data
        return members, clock

    members, clock = without_word9()
    written, trace, _ = await write(members, clock, deadline_s=3e4, max_tokens=300, max_words=1)
    assert any(r.service and r.service["mode"] == "gated" for r in trace.rounds)
    assert written.finish_reason
    members, clock = without_word9()
    written, trace, _ = await write(members, clock, deadline_s=1)
    assert written.finish_reason == "stop"
    assert {r.service["mode"] for r in trace.rounds} == {"single"}
    assert " word8 and " in written.text


def test_a_used_up_budget_ends_the_text_by_length_and_keeps_what_was_written():
    with Engine(members=two()) as e:
        done = e.generate("x", max_forward_passes=200, max_tokens=400)
        assert sum(m.forward_passes for m in done.usage.members) in range(196, 201)
        assert done.finish_reason == "length"
        assert done.text
        assert TEXT.startswith(done.text)
        assert done.text == "".join(r.text for r in done.trace.rounds)
        assert done.usage.completion_tokens > 80
        last = done.trace.rounds[-1].service
        assert (last["mode"], last["because"]) == ("single", "max_forward_passes")
        empty = e.generate("x", max_forward_passes=1)
        assert (empty.text, empty.finish_reason, empty.trace.rounds) == ("", "length", [])
        assert "".join(c.text for c in e.stream("x", max_forward_passes=1)) == ""


def test_a_budget_that_is_enough_ends_the_text_by_itself():
    with Engine(members=two(answer=" Paris is nice.")) as e:
        done = e.generate("x", max_forward_passes=10**6)
    assert (done.text, done.finish_reason) == (" Paris is nice.", "stop")
    assert all(r.service is None for r in done.trace.rounds)


# ---- the faces


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_limit_must_be_positive_and_finite(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        DecodingConfig(**{name: value})


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_survives_a_preset_in_a_call_and_can_be_lifted(name):
    limited = DecodingConfig(**{name: 7}).override(preset="paper")
    assert getattr(limited, name) == 7
    assert getattr(limited.override(**{name: None}), name) is None


def test_the_trace_says_what_was_done_in_plain_json():
    with Engine(members=two()) as e:
        done = e.generate("x", deadline_s=1e-9)
    shown = done.to_dict()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["trace"]["rounds"][0]["service"] == {
        "mode": "single",
        "threshold": 0.0,
        "branches": 1,
        "max_words": 3,
        "because": "deadline_s",
    }


def test_the_cache_key_of_langchain_tells_limits_apart():
    pytest.importorskip("langchain_core")
    from adafuse_integrations.langchain import AdaFuseLLM

    with Engine(members=two()) as e:
        keys = {str(AdaFuseLLM(engine=e, **{name: 7})._identifying_params) for name in LIMITS}
        keys.add(str(AdaFuseLLM(engine=e)._identifying_params))
    assert len(keys) == 4
