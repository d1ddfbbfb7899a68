"""LangChain's cache: an answer is found again for the same ensemble and settings, and for no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from adafuse_integrations.langchain import AdaFuseLLM
from tests.support.scripted import Make, script_loading


@pytest.fixture(autouse=True)
def cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


def test_same_call_is_answered_once(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine)
    assert llm.invoke("Q:") == llm.invoke("Q:") == " Paris is the capital."
    assert len(a.prompts) == 1


async def test_sync_and_async_calls_share_answers(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine)
    assert llm.invoke("Q:", max_tokens=2) == await llm.ainvoke("Q:", max_tokens=2)
    assert llm.batch(["Q:"], max_tokens=2) == await llm.abatch(["Q:"], max_tokens=2)
    assert len(a.prompts) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"temperature": 0.1, "seed": 1}, {"temperature": 0.9, "seed": 1}),
        ({"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "seed": 2}),
        ({"max_tokens": 2}, {"max_tokens": 3}),
        ({"threshold": 0.2}, {}),
        ({"preset": "paper"}, {"preset": "default"}),
        ({"branches": 2}, {"branches": 4}),
        ({"stop": ["x"]}, {"stop": ["y"]}),
    ],
)
async def test_other_settings_of_a_call_are_other_answers(
    make_engine: Make, first: dict[str, object], second: dict[str, object]
) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine)
    llm.invoke("Q:", **first)
    await llm.ainvoke("Q:", **second)
    assert len(a.prompts) == 2
    llm.invoke("Q:", **second)
    await llm.ainvoke("Q:", **first)
    assert len(a.prompts) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [({"stop": [" is"]}, {"stop": [" the"]}), ({"stop": [" is"]}, {}), ({"gate": "any_certain"}, {})],
)
def test_other_configured_settings_are_other_answers(
    make_engine: Make, first: dict[str, object], second: dict[str, object]
) -> None:
    engine, a, _ = make_engine()
    AdaFuseLLM(engine=engine, **first).invoke("Q:")
    AdaFuseLLM(engine=engine, **second).invoke("Q:")
    assert len(a.prompts) == 2


def test_setting_given_to_a_call_or_configured_is_the_same(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    AdaFuseLLM(engine=engine, max_tokens=2).invoke("Q:")
    AdaFuseLLM(engine=engine).invoke("Q:", max_tokens=2)
    assert len(a.prompts) == 1


def test_other_ready_members_are_another_ensemble(make_engine: Make) -> None:
    first, *_ = make_engine(" one")
    second, *_ = make_engine(" two")
    assert AdaFuseLLM(engine=first).invoke("Q:") == " one"
    assert AdaFuseLLM(engine=second).invoke("Q:") == " two"


def test_other_models_weights_or_precisions_are_another_ensemble(
    monkeypatch: pytest.MonkeyPatch, cache: InMemoryCache
) -> None:
    script_loading(monkeypatch)
    for models in (
        ["org/one", "org/two"],
        ["org/two", "org/one"],
        ["org/one", {"model": "org/two", "weight": 2.0}],
        ["org/one", {"model": "org/two", "dtype": "bfloat16"}],
        ["org/one", {"model": "org/two", "revision": "v2"}],
    ):
        AdaFuseLLM(models=models).invoke("Q:")
    assert len(cache._cache) == 5


def test_draws_without_a_seed_are_drawn_anew(make_engine: Make, cache: InMemoryCache) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine, temperature=0.5)
    llm.invoke("Q:")
    llm.invoke("Q:")
    llm.generate(["Q:", "Q:"])
    assert len(a.prompts) == 4
    assert not cache._cache


def test_cache_given_to_the_llm_itself_keeps_draws(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine, temperature=0.5, cache=InMemoryCache())
    assert llm.invoke("Q:") == llm.invoke("Q:")
    assert len(a.prompts) == 1


def test_llm_without_a_cache_is_not_cached(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine, cache=False)
    llm.invoke("Q:")
    llm.invoke("Q:", max_tokens=200)
    llm.invoke("Q:")
    assert len(a.prompts) == 3


def test_streams_are_not_cached(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    for _ in range(2):
        list(AdaFuseLLM(engine=engine).stream("Q:"))
    assert len(a.prompts) == 2


def test_cached_answer_keeps_its_usage(make_engine: Make) -> None:
    engine, *_ = make_engine()
    llm = AdaFuseLLM(engine=engine)
    fresh, cached = (llm.generate(["Q:"]).generations[0][0] for _ in range(2))
    assert cached.generation_info["usage"] == fresh.generation_info["usage"]
