"""Construction: fields, one shared engine, what is shown, copied and counted."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from langchain_core.load import dumpd, dumps
from langchain_core.runnables import ConfigurableField

from adafuse_engine import (
    DecodingConfig,
    Engine,
    EngineConfig,
    InvalidArgumentError,
    MemberConfig,
    UnknownArgumentError,
)
from adafuse_integrations.langchain import AdaFuseLLM
from tests.support.scripted import Make, script_loading


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    return script_loading(monkeypatch)


def test_models_are_loaded_at_first_use_and_once(loaded: list[EngineConfig]) -> None:
    llm = AdaFuseLLM(models=["org/one", "org/two"], threshold=0.5)
    assert loaded == []
    assert llm.invoke("Q:") == llm.invoke("Q:") == " Paris is the capital."
    assert [m.model for m in loaded[0].members] == ["org/one", "org/two"]
    assert len(loaded) == 1


async def test_models_are_loaded_off_the_event_loop(loaded: list[EngineConfig]) -> None:
    llm = AdaFuseLLM(models=["org/one"])
    assert await llm.ainvoke("Q:") == " Paris is the capital."
    assert [piece async for piece in llm.astream("Q:")]
    assert len(loaded) == 1


def test_llms_with_the_same_models_share_one_engine(loaded: list[EngineConfig]) -> None:
    first = AdaFuseLLM(models=["org/one"], max_tokens=1)
    second = AdaFuseLLM(models=[MemberConfig(model="org/one")], max_tokens=2)
    assert (first.invoke("Q:"), second.invoke("Q:")) == (" Pari", " Paris")
    assert len(loaded) == 1


def test_configured_copies_share_the_engine(loaded: list[EngineConfig]) -> None:
    llm = AdaFuseLLM(models=["org/one"], branches=2).configurable_fields(
        max_tokens=ConfigurableField(id="most"), threshold=ConfigurableField(id="threshold")
    )
    assert llm.invoke("Q:") == " Paris is the capital."
    assert llm.invoke("Q:", {"configurable": {"most": 1}}) == " Pari"
    assert llm.with_config(configurable={"most": 2}).invoke("Q:") == " Paris"
    assert "".join(llm.stream("Q:", {"configurable": {"most": 2, "threshold": 0.1}})) == " Paris"
    assert len(loaded) == 1


def test_configured_copies_of_a_ready_engine_share_it(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine, max_tokens=2).configurable_fields(seed=ConfigurableField(id="seed"))
    assert llm.invoke("Q:", {"configurable": {"seed": 5}}) == " Paris"
    assert len(a.prompts) == 1


def test_any_decoding_setting_may_be_given(make_engine: Make) -> None:
    engine, *_ = make_engine()
    for llm in (
        AdaFuseLLM(engine=engine, fusion="vote", branches=2, threshold=0.25),
        AdaFuseLLM(engine=engine, decoding={"fusion": "vote", "branches": 2, "threshold": 0.25}),
        AdaFuseLLM(engine=engine, decoding=DecodingConfig(fusion="vote", branches=2), threshold=0.25),
    ):
        settings = llm.generate(["Q:"]).generations[0][0].generation_info["adafuse_trace"]["settings"]
        assert (settings["fusion"], settings["branches"], settings["threshold"]) == ("vote", 2, 0.25)


def test_setting_beside_a_preset_wins(make_engine: Make) -> None:
    engine, *_ = make_engine()
    llm = AdaFuseLLM(engine=engine, preset="paper", branches=5)
    settings = llm.generate(["Q:"]).generations[0][0].generation_info["adafuse_trace"]["settings"]
    assert (settings["fusion"], settings["branches"]) == ("mean_nll", 5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"models": ["m"], "treshold": 0.5}, UnknownArgumentError, "did you mean 'threshold'"),
        ({"model": ["m"]}, UnknownArgumentError, "did you mean 'models'"),
        ({"models": ["m"], "decoding": {"branch": 1}}, UnknownArgumentError, "did you mean 'branches'"),
        ({"models": [{"model": "m", "weigth": 1}]}, UnknownArgumentError, "did you mean 'weight'"),
        ({"models": ["m"], "threshold": 1.5}, InvalidArgumentError, "threshold"),
        ({"models": ["m"], "max_tokens": "many"}, InvalidArgumentError, "max_tokens"),
        ({"models": ["m"], "preset": "papers"}, InvalidArgumentError, "preset"),
        ({"models": ["m"], "stop": [""]}, InvalidArgumentError, "stop"),
        ({"models": ["m"], "decoding": 3}, InvalidArgumentError, "decoding"),
        ({"models": ["m", "m"]}, InvalidArgumentError, "called 'm'"),
        ({"models": [{"model": "m", "weight": -1}]}, InvalidArgumentError, "weight"),
        ({"models": []}, InvalidArgumentError, "models="),
        ({"models": "gpt2"}, InvalidArgumentError, "models="),
        ({"models": [3]}, InvalidArgumentError, "models"),
        ({}, InvalidArgumentError, "engine="),
        ({"engine": "gpt2"}, InvalidArgumentError, "engine"),
    ],
)
def test_wrong_construction_is_refused_at_once(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AdaFuseLLM(**arguments)


def test_models_and_an_engine_together_are_refused(make_engine: Make) -> None:
    engine, *_ = make_engine()
    with pytest.raises(InvalidArgumentError, match="not both"):
        AdaFuseLLM(engine=engine, models=["m"])


def test_one_stop_string_may_be_given_as_it_is(make_engine: Make) -> None:
    engine, *_ = make_engine()
    assert AdaFuseLLM(engine=engine, stop=" the").invoke("Q:") == " Paris is"


def test_tokens_are_counted_by_the_first_members_tokenizer(make_engine: Make) -> None:
    engine, *_ = make_engine()
    llm = AdaFuseLLM(engine=engine)
    text = "Some text,\n\n你好 🎉"
    assert llm.get_token_ids(text) == engine.tokenize(text)
    assert llm.get_num_tokens(text) == engine.count_tokens(text) > 0
    assert AdaFuseLLM(engine=engine, custom_get_token_ids=lambda t: [7]).get_num_tokens(text) == 1


def test_identity_does_not_need_the_models(loaded: list[EngineConfig]) -> None:
    llm = AdaFuseLLM(models=["org/one", "dir/two.gguf"])
    assert llm.model_name == "one+two"
    assert llm._identifying_params["model_name"] == "one+two"
    assert json.loads(json.dumps(llm._identifying_params)) == llm._identifying_params
    assert llm._llm_type == "adafuse"
    assert loaded == []


def test_what_is_shown_and_dumped_holds_no_engine_and_no_secret(make_engine: Make) -> None:
    engine, *_ = make_engine()
    secret = MemberConfig(model="org/one", model_kwargs={"token": "hf_secret"})
    for llm in (AdaFuseLLM(engine=engine, threshold=0.5), AdaFuseLLM(models=[secret])):
        for shown in (repr(llm), str(llm), dumps(llm), dumps(llm | (lambda x: x)), str(llm.asdict())):
            assert "Engine(" not in shown
            assert "hf_secret" not in shown
    assert dumpd(AdaFuseLLM(engine=engine, threshold=0.5))["repr"] == (
        "AdaFuseLLM(model_name='a+b', threshold=0.5)"
    )


def test_copies_share_the_engine(make_engine: Make) -> None:
    engine, *_ = make_engine()
    llm = AdaFuseLLM(engine=engine, max_tokens=2, decoding={"branches": 2})
    for other in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy(deep=True)):
        assert other.engine is engine
        assert other.invoke("Q:") == " Paris"
    assert copy.deepcopy(llm).decoding is not llm.decoding


def test_llm_made_from_models_can_be_pickled(loaded: list[EngineConfig]) -> None:
    llm = AdaFuseLLM(models=["org/one"], max_tokens=2, fusion="vote")
    llm.invoke("Q:")
    other = pickle.loads(pickle.dumps(llm))
    assert other.invoke("Q:") == " Paris"
    assert other._identifying_params == llm._identifying_params
    assert len(loaded) == 1


def test_llm_made_from_an_engine_says_why_it_cannot_be_pickled(make_engine: Make) -> None:
    engine, *_ = make_engine()
    with pytest.raises(InvalidArgumentError, match=r"models=\[...\]"):
        pickle.dumps(AdaFuseLLM(engine=engine))


def test_models_are_loaded_again_after_their_engine_was_closed(loaded: list[EngineConfig]) -> None:
    llm = AdaFuseLLM(models=["org/one"])
    llm.invoke("Q:")
    Engine.shared(loaded[0]).close()
    assert llm.invoke("Q:") == " Paris is the capital."
    assert len(loaded) == 2
