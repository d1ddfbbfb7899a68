"""Settings: presets, overriding, and errors that help."""

import pytest

from adafuse_engine import (
    ConfigError,
    DecodingConfig,
    EngineConfig,
    InvalidArgumentError,
    MemberConfig,
    UnknownArgumentError,
)


def test_the_default_is_what_the_measurements_favour():
    d = DecodingConfig()
    assert (d.gate, d.fusion, d.mix, d.branches) == ("never", "word_posterior", "geometric", 3)


def test_the_paper_preset_is_the_published_method():
    p = DecodingConfig(preset="paper")
    assert (p.gate, p.fusion, p.threshold, p.max_words, p.branches) == ("never", "mean_nll", 0.7, 3, 3)


def test_an_argument_wins_over_the_preset_beside_it():
    assert DecodingConfig(preset="paper", threshold=0.5).threshold == 0.5
    assert DecodingConfig().override(preset="paper", branches=5).branches == 5


def test_a_preset_in_a_call_wins_over_the_configured_method_and_leaves_the_rest():
    base = DecodingConfig(fusion="vote", threshold=0.2, max_tokens=7, stop="x", seed=3)
    called = base.override(preset="paper")
    assert (called.fusion, called.threshold) == ("mean_nll", 0.7)
    assert (called.max_tokens, called.stop, called.seed) == (7, ("x",), 3)


def test_overriding_nothing_changes_nothing():
    d = DecodingConfig(threshold=0.1)
    assert d.override() is d


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(UnknownArgumentError, match=r"'tresh'.*'threshold'"):
        DecodingConfig(tresh=0.5)
    with pytest.raises(UnknownArgumentError, match=r"'max_new_tokens'.*'max_.*tokens'"):
        DecodingConfig().override(max_new_tokens=5)
    with pytest.raises(UnknownArgumentError, match=r"'wieght'.*'weight'"):
        EngineConfig(members=[{"model": "a", "wieght": 2}])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threshold", 1.5),
        ("threshold", float("nan")),
        ("branches", 0),
        ("max_words", 0),
        ("max_tokens", 0),
        ("temperature", -1),
        ("temperature", float("inf")),
        ("fusion", "best"),
        ("preset", "fast"),
        ("gate", "always"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", ""),
        ("stop", 5),
        ("top_p", 0),
    ],
)
def test_a_value_that_a_setting_cannot_take_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        DecodingConfig(**{name: value})
    with pytest.raises(InvalidArgumentError, match=name):
        DecodingConfig().override(**{name: value})


def test_stop_may_be_one_string_or_many_or_none():
    assert DecodingConfig(stop="\n").stop == ("\n",)
    assert DecodingConfig(stop=["a", "b", "a"]).stop == ("a", "b")
    assert DecodingConfig(stop=None).stop == ()


def test_an_ensemble_needs_members():
    with pytest.raises(InvalidArgumentError, match="at least one member"):
        EngineConfig(members=[])


def test_weights_must_be_usable():
    with pytest.raises(InvalidArgumentError, match="weight"):
        MemberConfig(model="a", weight=-1)
    with pytest.raises(InvalidArgumentError, match="all weights are zero"):
        EngineConfig(members=[MemberConfig(model="a", weight=0), MemberConfig(model="b", weight=0)])


def test_two_members_need_two_names():
    with pytest.raises(InvalidArgumentError, match="two members are called 'a'"):
        EngineConfig(members=["x/a", "y/a"])
    EngineConfig(members=["x/a", MemberConfig(model="x/a", name="b")])


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("bundled:gemma-3-270m", "gemma-3-270m"),
        ("/models/foo.gguf", "foo"),
        ("./folder/", "folder"),
        ("gpt2", "gpt2"),
    ],
)
def test_a_member_is_called_by_the_last_part_of_its_model(model, label):
    assert MemberConfig(model=model).label == label


def test_members_that_differ_only_in_how_they_are_asked_share_weights():
    one = MemberConfig(model="m", name="one", weight=2, chat_template="x")
    two = MemberConfig(model="m", name="two")
    assert one.weights_key() == two.weights_key()
    assert one.weights_key() != MemberConfig(model="m", dtype="bfloat16").weights_key()


def test_configs_are_frozen_and_every_error_is_a_config_error():
    with pytest.raises(ValueError, match="frozen"):
        DecodingConfig().threshold = 0.1
    with pytest.raises(ConfigError):
        MemberConfig(model="")
