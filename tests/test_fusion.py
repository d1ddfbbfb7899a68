"""Scores to winners, against values worked out by hand."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafuse_engine.errors import NoScoreError
from adafuse_engine.fusion import Rules, can_win, fuse, is_worth_scoring
from adafuse_engine.types import Branch, Candidate, Score


def cand(*words, end=False):
    return Candidate(tuple(w.encode() for w in words), end, (True,) * len(words))


def score(*cumulative, tokens=1, boundary=None, end=None):
    return Score(tuple(cumulative), tuple(boundary or [0.0] * len(cumulative)), tokens, end)


def decide(candidates, scores, rule, *, weights=None, confidences=None, **options):
    n = len(scores)
    return fuse(
        candidates,
        scores,
        weights or [1 / n] * n,
        confidences or [1.0] * n,
        Rules(rule, **options),
        Random(0),
    )


def test_mean_nll_averages_over_tokens_and_members():
    made = decide(
        [cand(" a"), cand(" bcd")],
        [[score(-1.0), score(-3.0, tokens=3)], [score(-2.0), score(-3.0, tokens=2)]],
        "mean_nll",
    )
    assert made.scores == pytest.approx((-1.5, -1.25))
    assert made.index == 1


def test_mean_nll_prefers_an_early_end_that_word_posterior_does_not():
    candidates = [cand(" word"), cand(end=True)]
    scores = [[score(-1.2, tokens=1), score(tokens=1, end=-1.1)], [score(-0.2), score(tokens=1, end=-3.0)]]
    assert decide(candidates, scores, "word_posterior").index == 0


def test_bits_per_byte_divides_by_bytes_and_the_end_is_one():
    made = decide([cand("abcd"), cand(end=True)], [[score(-4.0), score(end=-2.0)]], "bits_per_byte")
    assert made.scores == pytest.approx((-1 / math.log(2), -2 / math.log(2)))


def test_word_posterior_adds_the_mass_that_the_word_ends_there():
    made = decide(
        [cand(" the"), cand(" then")],
        [[score(math.log(0.5), boundary=[math.log(0.1)]), score(math.log(0.2), boundary=[0.0])]],
        "word_posterior",
    )
    assert made.index == 1
    assert made.scores == pytest.approx((math.log(0.05), math.log(0.2)))


def test_word_posterior_goes_deeper_only_while_more_likely_than_not():
    long, other = cand(" a", " b", " c"), cand(" x")
    likely = [[score(math.log(0.9), math.log(0.6), math.log(0.4)), score(math.log(0.1))]]
    made = decide([long, other], likely, "word_posterior")
    assert (made.index, made.words, made.end) == (0, 2, False)


def test_word_posterior_takes_the_best_first_word_even_if_it_is_unlikely():
    made = decide([cand(" a"), cand(" b")], [[score(math.log(0.1)), score(math.log(0.2))]], "word_posterior")
    assert (made.index, made.words) == (1, 1)


def test_word_posterior_commits_the_end_after_words_if_it_is_likely():
    ended = cand(" a", end=True)
    made = decide([ended, cand(" b")], [[score(math.log(0.9), end=math.log(0.8)), score(-3.0)]], "word_posterior")
    assert (made.words, made.end) == (1, True)
    made = decide([ended, cand(" b")], [[score(math.log(0.9), end=math.log(0.4)), score(-3.0)]], "word_posterior")
    assert (made.words, made.end) == (1, False)


def test_vote_sums_confidence_times_each_members_share():
    candidates = [cand(" a"), cand(" b")]
    scores = [
        [score(math.log(0.6)), score(math.log(0.2))],
        [score(math.log(0.1)), score(math.log(0.3))],
    ]
    made = decide(candidates, scores, "vote", confidences=[0.2, 0.9], arithmetic=True)
    assert [math.exp(s) for s in made.scores] == pytest.approx(
        [0.5 * (0.2 * 0.75 + 0.9 * 0.25), 0.5 * (0.2 * 0.25 + 0.9 * 0.75)]
    )
    assert made.index == 1


def test_arithmetic_mix_averages_probabilities_and_geometric_their_logarithms():
    scores = [[score(math.log(0.9)), score(math.log(0.5))], [score(math.log(0.001)), score(math.log(0.2))]]
    pair = [cand(" a"), cand(" b")]
    assert decide(pair, scores, "word_posterior").index == 1
    made = decide(pair, scores, "word_posterior", arithmetic=True)
    assert made.index == 0
    assert math.exp(made.scores[0]) == pytest.approx((0.9 + 0.001) / 2)


def test_weights_decide_between_members():
    scores = [[score(-1.0), score(-2.0)], [score(-2.0), score(-1.0)]]
    pair = [cand(" a"), cand(" b")]
    assert decide(pair, scores, "mean_nll", weights=[0.7, 0.3]).index == 0
    assert decide(pair, scores, "mean_nll", weights=[0.3, 0.7]).index == 1
    assert decide(pair, scores, "mean_nll", weights=[0.0, 1.0]).index == 1


@pytest.mark.parametrize("rule", ["mean_nll", "bits_per_byte", "word_posterior", "vote"])
def test_ties_go_to_the_earlier_candidate(rule):
    assert decide([cand(" a"), cand(" b")], [[score(-1.0), score(-1.0)]], rule).index == 0


@pytest.mark.parametrize("rule", ["mean_nll", "bits_per_byte", "word_posterior", "vote"])
@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_member_with_a_score_that_is_not_finite_abstains_from_the_whole_choice(rule, wrong):
    pair = [cand(" a"), cand(" b")]
    scores = [[score(-1.0), score(wrong)], [score(-3.0), score(-2.0)]]
    made = decide(pair, scores, rule)
    assert made.abstained == (0,)
    assert made.index == 1


def test_it_is_an_error_if_all_abstain():
    with pytest.raises(NoScoreError, match="float32"):
        decide([cand(" a")], [[score(math.nan)]], "mean_nll")


def test_a_temperature_draws_in_proportion():
    pair = [cand(" a"), cand(" b")]
    scores = [[score(math.log(0.75)), score(math.log(0.25))]]
    rules = Rules("word_posterior", temperature=1.0)
    drawn = [fuse(pair, scores, [1.0], [1.0], rules, Random(i)).index for i in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(0.25, abs=0.04)


logs = st.floats(-20, -0.01)


@given(st.lists(st.tuples(logs, logs), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_members_changes_nothing_but_ties(values, random):
    candidates = [cand(f" {i}") for i in range(len(values))]
    a = [score(x) for x, _ in values]
    b = [score(y) for _, y in values]
    for rule in ("mean_nll", "bits_per_byte", "word_posterior", "vote"):
        one = decide(candidates, [a, b], rule, weights=[0.4, 0.6], confidences=[0.3, 0.8])
        two = decide(candidates, [b, a], rule, weights=[0.6, 0.4], confidences=[0.8, 0.3])
        assert one.scores == pytest.approx(two.scores)


# ---- bounds


def wins(branch, candidates, scores, rule="word_posterior", **options):
    return can_win(branch, 0, candidates, scores, [0.5, 0.5], Rules(rule, **options))


def test_a_first_word_that_cannot_reach_the_best_is_left_out():
    known = [cand(" a")], [[score(math.log(0.6))], [score(math.log(0.6))]]
    # At best the other member is certain of it: sqrt(0.3) < 0.6 < sqrt(0.4).
    assert not wins(Branch((), math.log(0.3)), *known)
    assert wins(Branch((), math.log(0.4)), *known)


def test_an_arithmetic_mix_has_a_bound_of_its_own():
    known = [cand(" a")], [[score(math.log(0.6))], [score(math.log(0.6))]]
    assert wins(Branch((), math.log(0.3)), *known, arithmetic=True)


def test_a_deeper_word_must_be_more_likely_than_not():
    known = [cand(" a", " b")], [[score(-0.1, -1.0)], [score(math.log(0.5), -1.0)]]
    assert not wins(Branch((b" a",), math.log(0.4)), *known)
    assert wins(Branch((b" a",), math.log(0.6)), *known)


def test_without_a_bound_or_with_a_draw_every_branch_is_written():
    known = [cand(" a")], [[score(-0.1)], [score(-0.1)]]
    for rule in ("mean_nll", "bits_per_byte", "vote"):
        assert wins(Branch((), -9.0), *known, rule=rule)
    assert wins(Branch((), -9.0), *known, temperature=1.0)


@pytest.mark.parametrize("rule", ["mean_nll", "bits_per_byte"])
def test_a_candidate_its_proposer_likes_too_little_is_not_scored(rule):
    known = [cand(" abc")], [[score(-1.0)], [score(-1.0)]]
    args = (*known, [0.5, 0.5], Rules(rule))
    assert not is_worth_scoring(cand(" xyz"), 0, score(-2.1), *args)
    assert is_worth_scoring(cand(" xyz"), 0, score(-1.9), *args)
    assert is_worth_scoring(cand(" xyz"), 0, score(-9.0), *known, [0.5, 0.5], Rules("vote"))


triples = st.tuples(logs, logs, logs)


@given(st.lists(st.tuples(triples, triples), min_size=2, max_size=5), st.booleans(), st.floats(0.1, 0.9))
def test_bounds_never_leave_out_a_winner(values, arithmetic, weight):
    """Each candidate is a branch with a first token, a rest and a word end; the last is known only as such."""
    weights = [weight, 1 - weight]
    candidates = [cand(f" w{i}") for i in range(len(values))]
    rows = [[score(a + b, boundary=[c]) for a, b, c in [pair[k] for pair in values]] for k in (0, 1)]
    for rule in ("word_posterior", "mean_nll", "bits_per_byte"):
        rules = Rules(rule, arithmetic)
        made = fuse(candidates, rows, weights, [1, 1], rules, Random(0))
        last = len(values) - 1
        if made.index == last:
            some = candidates[:last], [row[:last] for row in rows]
            assert can_win(Branch((), values[last][0][0]), 0, *some, weights, rules)
            assert is_worth_scoring(candidates[last], 0, rows[0][last], *some, weights, rules)
