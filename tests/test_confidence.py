"""A distribution's confidence, against values worked out by hand."""

import math

import pytest

from adafuse_engine.confidence import Distribution, confidence


def dist(*probabilities, entropy=math.nan, size=None):
    logs = tuple(math.log(p) for p in probabilities)
    return Distribution(tuple(range(len(logs))), logs, -math.inf, 0.0, entropy, size or len(logs))


def test_margin_is_the_lead_of_the_best_token():
    assert confidence(dist(0.6, 0.3, 0.1), "margin") == pytest.approx(0.3)


def test_max_prob_is_the_best_tokens_probability():
    assert confidence(dist(0.6, 0.3, 0.1), "max_prob") == pytest.approx(0.6)


def test_entropy_is_zero_for_a_flat_and_one_for_a_certain_distribution():
    assert confidence(dist(0.25, 0.25, entropy=math.log(4), size=4), "entropy") == pytest.approx(0.0)
    assert confidence(dist(1.0, entropy=0.0, size=4), "entropy") == 1.0
    assert confidence(dist(0.5, 0.5, entropy=math.log(2), size=16), "entropy") == pytest.approx(0.75)


@pytest.mark.parametrize("kind", ["margin", "max_prob", "entropy"])
def test_a_vocabulary_of_one_token_is_certain(kind):
    assert confidence(dist(1.0, entropy=0.0), kind) == 1.0


def test_nan_is_no_distribution():
    assert not Distribution((0,), (math.nan,), 0.0, 0.0, 0.0, 5).finite
