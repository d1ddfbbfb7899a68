"""The eight methods give the same text and obey the same arguments; prompts arrive once and whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, ImageBlock
from llama_index.core.prompts import PromptTemplate

from adafuse_engine import (
    EmptyPromptError,
    InvalidArgumentError,
    MemberError,
    PromptError,
    UnknownArgumentError,
)
from adafuse_integrations.llama_index import AdaFuseLLM
from tests.support.scripted import HARD_TEXT, Make

Responses = Sequence[CompletionResponse | ChatResponse]
Road = Callable[..., Awaitable[Responses]]


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


async def complete(llm: AdaFuseLLM, text: str, **kwargs: Any) -> Responses:
    return [await asyncio.to_thread(llm.complete, text, **kwargs)]


async def stream_complete(llm: AdaFuseLLM, text: str, **kwargs: Any) -> Responses:
    return await asyncio.to_thread(lambda: list(llm.stream_complete(text, **kwargs)))


async def acomplete(llm: AdaFuseLLM, text: str, **kwargs: Any) -> Responses:
    return [await llm.acomplete(text, **kwargs)]


async def astream_complete(llm: AdaFuseLLM, text: str, **kwargs: Any) -> Responses:
    return [r async for r in await llm.astream_complete(text, **kwargs)]


async def chat(llm: AdaFuseLLM, text: str, **kwargs: Any) -> Responses:
    return [await asyncio.to_thread(llm.chat, user(text), **kwargs)]


async def stream_chat(llm: AdaFuseLLM, text: str, **kwargs: Any) -> Responses:
    return await asyncio.to_thread(lambda: list(llm.stream_chat(user(text), **kwargs)))


async def achat(llm: AdaFuseLLM, text: str, **kwargs: Any) -> Responses:
    return [await llm.achat(user(text), **kwargs)]


async def astream_chat(llm: AdaFuseLLM, text: str, **kwargs: Any) -> Responses:
    return [r async for r in await llm.astream_chat(user(text), **kwargs)]


completions = [complete, stream_complete, acomplete, astream_complete]
chats = [chat, stream_chat, achat, astream_chat]
streams = [stream_complete, astream_complete, stream_chat, astream_chat]

by_all = pytest.mark.parametrize("road", [*completions, *chats])
by_completion = pytest.mark.parametrize("road", completions)
by_chat = pytest.mark.parametrize("road", chats)
by_stream = pytest.mark.parametrize("road", streams)


def text_of(responses: Responses) -> str:
    last = responses[-1]
    return last.text if isinstance(last, CompletionResponse) else last.message.content or ""


@by_all
async def test_every_method_gives_the_engines_text(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(HARD_TEXT)
    assert text_of(await road(AdaFuseLLM(engine=engine), "Q:")) == HARD_TEXT


@by_stream
async def test_stream_text_is_cumulative_and_delta_is_what_came_new(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(HARD_TEXT)
    responses = await road(AdaFuseLLM(engine=engine), "Q:")
    assert len(responses) > 5
    written = ""
    for response in responses:
        written += response.delta or ""
        assert text_of([response]) == written
    assert written == HARD_TEXT


@by_all
async def test_raw_is_plain_json_with_usage_and_trace(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(HARD_TEXT)
    raw = (await road(AdaFuseLLM(engine=engine), "Q:"))[-1].raw
    assert set(raw) == {"usage", "finish_reason", "model", "adafuse_trace"}
    assert json.loads(json.dumps(raw)) == raw
    assert raw["model"] == "a+b"
    assert raw["finish_reason"] == "stop"
    assert raw["usage"]["completion_tokens"] == engine.generate("Q:").usage.completion_tokens > 0
    assert "".join(r["text"] for r in raw["adafuse_trace"]["rounds"]) == HARD_TEXT


@by_stream
async def test_streamed_pieces_tell_how_sure_the_members_were(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine()
    *before, _ = await road(AdaFuseLLM(engine=engine), "Q:")
    assert before
    for response in before:
        assert set(response.raw) == {"adafuse_chunk"}
        assert 0 <= response.raw["adafuse_chunk"]["confidence"] <= 1


@by_all
async def test_stop_strings_end_the_text_and_are_not_in_it(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(" one two\nObservation: three")
    llm = AdaFuseLLM(engine=engine, stop=["\nObservation:"])
    assert text_of(await road(llm, "Q:")) == " one two"
    assert text_of(await road(llm, "Q:", stop=[" two"])) == " one"
    assert text_of(await road(llm, "Q:", stop=["three"])) == " one two\nObservation: "


@by_all
async def test_settings_of_a_call_hold_for_that_call_only(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(" one two six ten")
    llm = AdaFuseLLM(engine=engine, max_tokens=3)
    assert text_of(await road(llm, "Q:", max_tokens=2)) == " one two"
    assert text_of(await road(llm, "Q:")) == " one two six"


@by_all
async def test_wrong_arguments_are_refused_before_anything_runs(make_engine: Make, road: Road) -> None:
    engine, a, _ = make_engine()
    with pytest.raises(UnknownArgumentError, match="did you mean 'temperature'"):
        await road(AdaFuseLLM(engine=engine), "Q:", temperatur=1)
    with pytest.raises(InvalidArgumentError, match="stop"):
        await road(AdaFuseLLM(engine=engine), "Q:", stop=[""])
    assert a.prompts == []


@by_all
async def test_engine_error_reaches_the_caller_as_itself(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine(nan_from=4)
    with pytest.raises(MemberError, match="NaN"):
        await road(AdaFuseLLM(engine=engine), "Q:")


@by_completion
async def test_empty_prompt_is_refused(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine()
    with pytest.raises(EmptyPromptError):
        await road(AdaFuseLLM(engine=engine), "")


@by_all
async def test_empty_answer_is_an_empty_text(make_engine: Make, road: Road) -> None:
    engine, *_ = make_engine("")
    responses = await road(AdaFuseLLM(engine=engine), "Q:")
    assert len(responses) == 1
    assert text_of(responses) == ""


# ---- prompts


@by_completion
async def test_text_is_passed_as_it_is_and_not_echoed(make_engine: Make, road: Road) -> None:
    engine, a, _ = make_engine(" yes")
    prompt = "  <s>[INST] Tabs\tand\n\nlines, 你好 🎉 ?"
    assert text_of(await road(AdaFuseLLM(engine=engine), prompt)) == " yes"
    assert a.prompts == [prompt]


@by_chat
async def test_messages_reach_the_members_own_templates(make_engine: Make, road: Road) -> None:
    engine, a, b = make_engine(" yes")
    assert text_of(await road(AdaFuseLLM(engine=engine), "Hi\n\n\tthere 你好")) == " yes"
    assert a.prompts == b.prompts == ["user: Hi\n\n\tthere 你好\nassistant:"]


@by_completion
async def test_system_prompt_reaches_a_completion_once(make_engine: Make, road: Road) -> None:
    engine, a, _ = make_engine()
    await road(AdaFuseLLM(engine=engine, system_prompt="Be brief."), "Q:")
    assert a.prompts == ["Be brief.\n\nQ:"]


@by_chat
async def test_system_prompt_reaches_a_chat_once(make_engine: Make, road: Road) -> None:
    engine, a, _ = make_engine()
    await road(AdaFuseLLM(engine=engine, system_prompt="Be brief."), "Q:")
    assert a.prompts == ["system: Be brief.\nuser: Q:\nassistant:"]


@pytest.mark.parametrize("is_chat_model", [False, True])
async def test_system_prompt_reaches_a_prediction_once(make_engine: Make, is_chat_model: bool) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine, system_prompt="Be brief.", is_chat_model=is_chat_model)
    template = PromptTemplate("Q: {q}")
    text = await asyncio.to_thread(llm.predict, template, q="why?")
    assert await llm.apredict(template, q="why?") == text
    assert "".join(await asyncio.to_thread(lambda: list(llm.stream(template, q="why?")))) == text
    assert "".join([t async for t in await llm.astream(template, q="why?")]) == text
    chat_form = "system: Be brief.\nuser: Q: why?\nassistant:"
    assert a.prompts == [chat_form if is_chat_model else "Be brief.\n\nQ: why?"] * 4


def test_system_prompt_is_not_repeated_where_the_history_has_it(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    history = [ChatMessage(role="system", content="Be brief. Context: none."), *user("Q:")]
    AdaFuseLLM(engine=engine, system_prompt="Be brief.").chat(history)
    assert a.prompts[0].count("Be brief.") == 1
    assert len(history) == 2


def test_completion_template_wraps_the_prompt_unless_it_is_formatted(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine, completion_to_prompt=lambda p: f"[{p}]", system_prompt="Be brief.")
    llm.complete("Q:")
    llm.complete("Q:", formatted=True)
    llm.predict(PromptTemplate("Q:"))
    assert a.prompts == ["Be brief.\n\n[Q:]", "Q:", "Be brief.\n\n[Q:]"]


def test_message_template_replaces_the_members_own(make_engine: Make) -> None:
    engine, a, _ = make_engine()

    def render(messages: Sequence[ChatMessage]) -> str:
        return "|".join(f"{m.role.value}={m.content}" for m in messages)

    AdaFuseLLM(engine=engine, messages_to_prompt=render, system_prompt="S").chat(user("Q:"))
    assert a.prompts == ["system=S|user=Q:"]


def test_trace_does_not_leak_into_the_next_prompt(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine)
    answer = llm.chat(user("One?")).message
    *_, streamed = llm.stream_chat([*user("One?"), answer, *user("Two?")])
    assert answer.additional_kwargs == streamed.message.additional_kwargs == {}
    llm.complete(str(llm.messages_to_prompt([*user("One?"), answer])))
    assert a.prompts[1] == "user: One?\nassistant:  Paris is the capital.\nuser: Two?\nassistant:"
    assert a.prompts[2] == "user: One?\nassistant:  Paris is the capital.\nassistant: "


def test_roles_of_other_services_become_the_four_that_templates_know(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    roles = ["developer", "user", "model", "user", "chatbot", "user", "assistant", "function", "tool", "user"]
    AdaFuseLLM(engine=engine).chat([ChatMessage(role=role, content="x") for role in roles])
    told = [line.split(":")[0] for line in a.prompts[0].splitlines()[:-1]]
    assert told == [
        "system", "user", "assistant", "user", "assistant", "user", "assistant", "tool", "tool", "user",
    ]  # fmt: skip


def test_message_that_is_not_text_is_refused_with_its_place(make_engine: Make) -> None:
    engine, *_ = make_engine()
    image = ChatMessage(role="user", blocks=[ImageBlock(image=b"R0lGODlhAQABAAAAACw=")])
    with pytest.raises(PromptError, match=r"message 1 \(user\) holds a ImageBlock"):
        AdaFuseLLM(engine=engine).chat([*user("See:"), image])


def test_streams_side_by_side_do_not_mix(make_engine: Make) -> None:
    engine, *_ = make_engine(lambda prompt: f" answer to {prompt} in some words")
    llm = AdaFuseLLM(engine=engine)
    pairs: Iterator[tuple[CompletionResponse, CompletionResponse]] = zip(
        llm.stream_complete("one"), llm.stream_complete("two"), strict=True
    )
    *_, (one, two) = pairs
    assert (one.text, two.text) == (" answer to one in some words", " answer to two in some words")
