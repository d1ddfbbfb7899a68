"""Every way to call the LLM gives the same text and obeys the same arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable

from adafuse_engine import (
    EmptyPromptError,
    InvalidArgumentError,
    MemberError,
    UnknownArgumentError,
)
from adafuse_integrations.langchain import AdaFuseLLM
from tests.support.scripted import HARD_TEXT, Make

Road = Callable[..., Awaitable[str]]


async def by_invoke(llm: Runnable[str, str], prompt: str, **kwargs: object) -> str:
    return await asyncio.to_thread(llm.invoke, prompt, **kwargs)


async def by_stream(llm: Runnable[str, str], prompt: str, **kwargs: object) -> str:
    return "".join(await asyncio.to_thread(lambda: list(llm.stream(prompt, **kwargs))))


async def by_batch(llm: Runnable[str, str], prompt: str, **kwargs: object) -> str:
    first, second = await asyncio.to_thread(llm.batch, [prompt, prompt], **kwargs)
    assert first == second
    return first


async def by_ainvoke(llm: Runnable[str, str], prompt: str, **kwargs: object) -> str:
    return await llm.ainvoke(prompt, **kwargs)


async def by_astream(llm: Runnable[str, str], prompt: str, **kwargs: object) -> str:
    return "".join([piece async for piece in llm.astream(prompt, **kwargs)])


async def by_abatch(llm: Runnable[str, str], prompt: str, **kwargs: object) -> str:
    first, second = await llm.abatch([prompt, prompt], **kwargs)
    assert first == second
    return first


roads = pytest.mark.parametrize("road", [by_invoke, by_stream, by_batch, by_ainvoke, by_astream, by_abatch])


@roads
async def test_every_road_gives_the_engines_text(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(HARD_TEXT)
    assert await road(AdaFuseLLM(engine=engine), "Q:") == engine.generate("Q:").text == HARD_TEXT


@roads
async def test_prompt_is_passed_as_it_is_and_not_echoed(make_engine: Make, road: Road) -> None:
    engine, a, b = make_engine(" yes")
    prompt = "  <s>[INST] Tabs\tand\n\nlines, 你好 🎉 ?"
    assert await road(AdaFuseLLM(engine=engine), prompt) == " yes"
    assert set(a.prompts) == set(b.prompts) == {prompt}


@roads
async def test_stop_string_of_a_call_ends_the_text_and_is_not_in_it(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(" one two\nObservation: three")
    assert await road(AdaFuseLLM(engine=engine), "Q:", stop=["\nObservation:"]) == " one two"


@roads
async def test_bound_stop_string_ends_the_text(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(" one two\nObservation: three")
    assert await road(AdaFuseLLM(engine=engine).bind(stop=["\nObs"]), "Q:") == " one two"


@roads
async def test_stop_strings_of_a_call_take_the_place_of_the_configured_ones(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(" one two three four")
    llm = AdaFuseLLM(engine=engine, stop=[" three"])
    assert await road(llm, "Q:") == " one two"
    assert await road(llm, "Q:", stop=[" two"]) == " one"
    assert await road(llm, "Q:", stop=[" four"]) == " one two three"


@roads
async def test_settings_of_a_call_hold_for_that_call_only(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(" one two six ten")
    llm = AdaFuseLLM(engine=engine, max_tokens=3)
    assert await road(llm, "Q:", max_tokens=2) == " one two"
    assert await road(llm.bind(max_tokens=1), "Q:") == " one"
    assert await road(llm, "Q:") == " one two six"


@roads
async def test_unknown_argument_of_a_call_is_refused_with_the_nearest_name(make_engine: Make, road: Road) -> None:
    engine, a, _ = make_engine()
    with pytest.raises(UnknownArgumentError, match="did you mean 'max_tokens'"):
        await road(AdaFuseLLM(engine=engine), "Q:", max_token=3)
    assert a.prompts == []


@roads
async def test_invalid_value_of_a_call_is_refused(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine()
    with pytest.raises(InvalidArgumentError, match="threshold"):
        await road(AdaFuseLLM(engine=engine), "Q:", threshold=2)
    with pytest.raises(InvalidArgumentError, match="stop"):
        await road(AdaFuseLLM(engine=engine), "Q:", stop=[""])


@roads
async def test_engine_error_reaches_the_caller_as_itself(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(nan_from=4)
    with pytest.raises(MemberError, match="NaN"):
        await road(AdaFuseLLM(engine=engine), "Q:")


@roads
async def test_empty_answer_is_an_empty_text(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine("")
    assert await road(AdaFuseLLM(engine=engine), "Q:") == ""


def test_empty_answer_streams_one_chunk(make_engine: Make) -> None:
    engine, *_ = make_engine("")
    assert list(AdaFuseLLM(engine=engine).stream("Q:")) == [""]


def test_seeded_draws_are_the_same_on_every_road(make_engine: Make) -> None:
    engine, *_ = make_engine(" one two three four five six", confidence=0.0)
    llm = AdaFuseLLM(engine=engine, temperature=3.0, max_tokens=12)
    texts = {llm.invoke("Q:", seed=seed) for seed in range(8)}
    assert len(texts) > 1
    for seed in range(3):
        text = llm.invoke("Q:", seed=seed)
        assert "".join(llm.stream("Q:", seed=seed)) == text
        assert llm.batch(["Q:", "Q:"], seed=seed) == [text, text]


def test_configured_settings_win_over_the_engines(make_engine: Make) -> None:
    engine, *_ = make_engine(" one two three four")
    assert AdaFuseLLM(engine=engine, max_tokens=1).invoke("Q:") == " one"
    assert AdaFuseLLM(engine=engine, decoding={"max_tokens": 2}).invoke("Q:") == " one two"


def test_failing_prompt_fails_alone_in_a_batch(make_engine: Make) -> None:
    engine, *_ = make_engine(lambda prompt: f" answer to {prompt}")
    first, error, last = AdaFuseLLM(engine=engine).batch(["one", " ", "two"], return_exceptions=True)
    assert (first, last) == (" answer to one", " answer to two")
    assert isinstance(error, EmptyPromptError)


async def test_failing_prompt_fails_alone_in_an_async_batch(make_engine: Make) -> None:
    engine, *_ = make_engine(lambda prompt: f" answer to {prompt}")
    first, error, last = await AdaFuseLLM(engine=engine).abatch(["one", " ", "two"], return_exceptions=True)
    assert (first, last) == (" answer to one", " answer to two")
    assert isinstance(error, EmptyPromptError)


def test_failing_prompt_is_raised_by_a_batch(make_engine: Make) -> None:
    engine, *_ = make_engine()
    with pytest.raises(EmptyPromptError):
        AdaFuseLLM(engine=engine).batch(["one", " "])


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_batch_keeps_the_order_under_a_concurrency_limit(make_engine: Make, limit: int) -> None:
    engine, *_ = make_engine(lambda prompt: f" answer to {prompt}")
    prompts = [f"question {i}" for i in range(5)]
    answers = AdaFuseLLM(engine=engine).batch(prompts, {"max_concurrency": limit})
    assert answers == [f" answer to {p}" for p in prompts]


def test_prompts_of_a_batch_run_side_by_side(make_engine: Make) -> None:
    seen = []
    engine, a, _ = make_engine(" word" * 50, delay=0.01, on_forward=lambda n: seen.append(a.open_sessions))
    AdaFuseLLM(engine=engine).batch(["Q1", "Q2", "Q3"])
    assert max(seen) > 1


def test_chain_of_prompt_llm_and_parser_answers(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    template = PromptTemplate.from_template("Question: {q}\nAnswer:")
    chain = template | AdaFuseLLM(engine=engine) | StrOutputParser()
    assert chain.invoke({"q": "Why?"}) == " Paris is the capital."
    assert "".join(chain.stream({"q": "Why?"})) == " Paris is the capital."
    assert a.prompts == ["Question: Why?\nAnswer:"] * 2
