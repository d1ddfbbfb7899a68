"""Weights from given texts."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafuse_engine import InvalidArgumentError
from adafuse_engine.calibration import learn_weights
from adafuse_engine.scoring import TextScore


def score(*rows):
    names = "abc"[: len(rows)]
    words = tuple("w" * len(rows[0]))
    return TextScore(words, False, dict(zip(names, map(tuple, rows), strict=True)), (1 / len(rows),) * len(rows))


def bits(scores, weights):
    return sum(s.total(weights=tuple(weights)) for s in scores)


def test_the_weights_of_a_mixture_are_found():
    rng = random.Random(0)
    rows = []
    for _ in range(4000):
        # A word that a makes with 0.9 and b with 0.1, or the other way round; a made 70 in 100.
        right, wrong = math.log(0.9), math.log(0.1)
        by_a = rng.random() < 0.7
        likely = rng.random() < 0.9
        rows.append((right, wrong) if by_a == likely else (wrong, right))
    learned = learn_weights([score(*zip(*rows, strict=True))])
    assert learned["a"] == pytest.approx(0.7, abs=0.04)
    assert sum(learned.values()) == pytest.approx(1)


@given(st.lists(st.tuples(*[st.floats(-20, -0.01)] * 3), min_size=1, max_size=30))
def test_no_other_weights_are_better(rows):
    scores = [score(*zip(*rows, strict=True))]
    learned = learn_weights(scores, prior=1e-9).values()
    best = bits(scores, learned)
    for other in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1 / 3] * 3, [0.6, 0.3, 0.1]):
        assert best >= bits(scores, other) - 1e-3


def test_impossible_words_have_no_say():
    scores = [score((-math.inf, -1.0), (-math.inf, -2.0))]
    assert learn_weights(scores)["a"] > learn_weights(scores)["b"]


def test_without_words_there_is_nothing_to_learn():
    for empty in ([], [TextScore((), False, {"a": ()}, (1.0,))]):
        with pytest.raises(InvalidArgumentError, match="no word"):
            learn_weights(empty)
