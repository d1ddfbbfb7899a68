"""Weights that follow the members' agreement."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafuse_engine import Engine
from adafuse_engine.adaptive import MOST, AdaptiveWeights
from adafuse_engine.testing import ScriptedMember
from adafuse_engine.types import Score

TEXT = " one two three four five six seven eight"


def scores(*members):
    return [[Score((value,), (0.0,), 1) for value in row] for row in members]


def test_who_agrees_gains_and_who_does_not_loses():
    weights = AdaptiveWeights([0.5, 0.5], 2.0)
    for _ in range(5):
        weights.note(scores([-0.1, -5.0], [-4.0, -0.1]), 0)
    assert weights.now[0] > 0.6
    assert sum(weights.now) == pytest.approx(1)


@given(st.lists(st.lists(st.floats(-50, 0), min_size=3, max_size=3), min_size=2, max_size=4), st.floats(0, 8))
def test_ratios_stay_within_their_bound(rows, strength):
    given_ = [1 / len(rows)] * len(rows)
    weights = AdaptiveWeights(given_, strength)
    for _ in range(30):
        weights.note(scores(*rows), 1)
    assert max(weights.now) <= MOST * min(weights.now) * (1 + 1e-9)


def test_a_member_that_abstains_neither_gains_nor_breaks_the_others():
    weights = AdaptiveWeights([0.5, 0.5], 1.0)
    weights.note(scores([math.nan, -1.0], [-0.1, -2.0]), 0)
    assert all(map(math.isfinite, weights.now))


def test_without_strength_nothing_moves_and_the_trace_is_as_it_was():
    with Engine(
        members=[ScriptedMember("a", TEXT, confidence=0.4), ScriptedMember("b", " no", confidence=0.2)]
    ) as e:
        rounds = e.generate("x", max_tokens=20).trace.rounds
    assert all(r.weights == () for r in rounds)


def test_the_trace_tells_the_weights_of_each_round():
    members = [ScriptedMember("a", TEXT, confidence=0.6), ScriptedMember("b", " no way", confidence=0.2)]
    with Engine(members=members) as engine:
        rounds = engine.generate("x", max_tokens=20, adaptive_weights=1.0, max_words=1).trace.rounds
    told = [r.weights for r in rounds if r.fused]
    assert told[0] == (0.5, 0.5)
    assert told[-1][0] > 0.5
    assert all(sum(w) == pytest.approx(1) for w in told)
