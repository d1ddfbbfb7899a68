"""What an ensemble thinks of a given text."""

import math

import pytest
import torch

from adafuse_engine import ContextWindowError, Engine
from adafuse_engine.scoring import TextScore, words_of
from adafuse_engine.testing import ScriptedMember
from tests.support import tiny

PROMPT = "The ferry leaves"
TEXT = " the harbour at seven in the morning."


@pytest.fixture(scope="module")
def members():
    return [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]


@pytest.fixture(scope="module")
def engine(members):
    with Engine(members=members, weights=[1, 3]) as engine:
        yield engine


def plain(member, prompt, text):
    """The text's log-probability by one forward over all of it, word by word tokenised as the engine does."""
    vocabulary, model = member.model.vocabulary, member.model.runner.model
    ids = member.prompt_ids(prompt)
    more = [t for word in words_of(text) for t in vocabulary.encode(word)]
    logits = model(torch.tensor([[*ids, *more]])).logits[0].double()
    logits[:, sorted(vocabulary.banned)] = -math.inf
    logprobs = logits.log_softmax(-1)
    total = sum(logprobs[len(ids) - 1 + i, t].item() for i, t in enumerate(more))
    return total, logprobs[-1][sorted(vocabulary.ends)].logsumexp(-1).item()


@pytest.mark.parametrize("text", [TEXT, TEXT * 12, " x", "\n\n你好 世界"])
def test_a_members_score_is_the_log_probability_of_its_tokens(engine, members, text):
    told = engine.score(PROMPT, text, end=True)
    for member in members:
        total, end = plain(member, PROMPT, text)
        assert sum(told.members[member.name]) == pytest.approx(total + end, abs=1e-3)
    assert "".join(told.words) == text


def test_without_an_end_the_last_word_may_go_on(engine, members):
    told = engine.score(PROMPT, TEXT)
    for member in members:
        assert sum(told.members[member.name]) == pytest.approx(plain(member, PROMPT, TEXT)[0], abs=1e-4)


def test_the_beginning_of_a_text_is_scored_without_a_prompt(engine):
    told = engine.score("", "The ferry leaves.", end=True)
    assert all(math.isfinite(v) for row in told.members.values() for v in row)
    assert [len(row) for row in told.members.values()] == [4, 4]


def test_a_text_is_scored_alike_under_every_setting(engine):
    plain = engine.score(PROMPT, TEXT).members
    for settings in (
        {"preset": "paper"},
        {"preset": "unite"},
        {"grammar": 'start: "no"'},
        {"word_end_mass": False},
    ):
        for name, row in engine.score(PROMPT, TEXT, **settings).members.items():
            assert row == pytest.approx(plain[name], abs=1e-4)


def test_side_by_side_is_one_by_one(engine):
    pairs = [(PROMPT, TEXT), ("One, two", " three"), ("x", "")]
    together = engine.score_batch(pairs)
    for (prompt, text), told in zip(pairs, together, strict=True):
        alone = engine.score(prompt, text)
        for name, row in alone.members.items():
            assert told.members[name] == pytest.approx(row, abs=1e-4)


def test_the_mixture_is_a_distribution_and_its_mean_never_flatters():
    told = TextScore(
        ("a", " b"), False, {"x": (math.log(0.2), math.log(0.9)), "y": (math.log(0.6), -9.0)}, (0.5, 0.5)
    )
    assert told.total() == pytest.approx(math.log(0.4) + math.log((0.9 + math.exp(-9)) / 2))
    assert told.total("geometric") < told.total()
    assert told.total(weights=(1, 0)) == told.total("geometric", (1, 0)) == pytest.approx(math.log(0.18))
    assert told.bytes == 3
    assert told.bits_per_byte(weights=(1, 0)) == pytest.approx(-math.log2(0.18) / 3)


def test_weights_are_the_engines_unless_given(engine):
    told = engine.score(PROMPT, TEXT)
    assert told.weights == (0.25, 0.75)
    assert told.total() == told.total(weights=(0.25, 0.75)) != told.total(weights=(0.5, 0.5))


def test_what_does_not_fit_gives_the_numbers():
    with (
        Engine(members=[ScriptedMember("one", "yes", context_window=8)]) as engine,
        pytest.raises(ContextWindowError, match="8"),
    ):
        engine.score("x", " word" * 30)


def test_words_join_to_the_text():
    for text in ("", "  a  b\n", TEXT, "你好,世界。 x"):
        assert b"".join(words_of(text)).decode() == text
    assert words_of("half a \ud83d")[-1] == b" ?"
