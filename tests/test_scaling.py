"""First tokens of the branches."""

import math
from collections import Counter
from random import Random

import pytest

from adafuse_engine.confidence import Distribution
from adafuse_engine.config import DecodingConfig
from adafuse_engine.scaling import first_tokens, tokens_needed

PROBS = (0.4, 0.3, 0.15, 0.1, 0.05)
FLAT = Distribution(tuple(range(5)), tuple(map(math.log, PROBS)), math.log(0.2), 0.0, math.nan, 5)


def pick(seed=0, ends=frozenset(), **options):
    return first_tokens(FLAT, ends, DecodingConfig(**options), Random(seed))


def test_top_k_takes_the_most_probable_in_order():
    assert pick(branches=3) == [0, 1, 2]


def test_end_tokens_are_one_choice_and_leave_room_for_words():
    assert pick(branches=3, ends={1, 2}) == [0, 1, 3]


def test_top_k_asks_for_enough_tokens_to_fill_the_branches_beside_the_ends():
    assert tokens_needed(DecodingConfig(branches=3), 2) == 4
    assert tokens_needed(DecodingConfig(branches=1), 0) == 2


@pytest.mark.parametrize("scaling", ["temperature", "nucleus", "entropy_nucleus"])
def test_sampling_keeps_the_greedy_token_first_and_repeats_with_its_seed(scaling):
    for seed in range(20):
        tokens = pick(seed, branches=3, scaling=scaling, top_p=1.0)
        assert tokens[0] == 0
        assert len(set(tokens)) == len(tokens) == 3
        assert tokens == pick(seed, branches=3, scaling=scaling, top_p=1.0)


def test_temperature_draws_in_proportion_to_probability():
    drawn = Counter(pick(seed, branches=2, scaling="temperature")[1] for seed in range(4000))
    # Without the greedy token the others have 0.3, 0.15, 0.1 and 0.05 of 0.6.
    assert drawn[1] / 4000 == pytest.approx(0.5, abs=0.04)
    assert drawn[4] / 4000 == pytest.approx(0.083, abs=0.03)


def test_nucleus_never_leaves_the_fewest_tokens_that_reach_top_p():
    for seed in range(50):
        assert set(pick(seed, branches=5, scaling="nucleus", top_p=0.8)) <= {0, 1, 2}


def test_entropy_nucleus_takes_no_more_branches_than_there_are_choices():
    sharp = Distribution((0, 1, 2), tuple(map(math.log, (0.98, 0.01, 0.01))), -math.inf, 0.0, math.nan, 3)
    settings = DecodingConfig(branches=3, scaling="entropy_nucleus", top_p=1.0)
    assert len(first_tokens(sharp, frozenset(), settings, Random(0))) == 2


def test_tokens_that_cannot_occur_are_no_choice():
    masked = Distribution((0, 1, 2), (math.log(0.9), math.log(0.1), -math.inf), -math.inf, 0.0, math.nan, 3)
    assert first_tokens(masked, frozenset(), DecodingConfig(branches=3), Random(0)) == [0, 1]
