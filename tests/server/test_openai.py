"""The real clients of OpenAI's API against the server: openai, langchain-openai, llama-index-llms-openai-like."""

import json
from collections.abc import Iterator

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from adafuse_engine import Engine
from adafuse_engine.testing import ScriptedMember
from tests.support.http import Running, running

ANSWER = " Paris is the capital."
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def answer(prompt: str) -> str:
    """Calls the tool where there is one, and reads its result."""
    if "sunny" in prompt:
        return " It is sunny."
    return CALL if "weather" in prompt else ANSWER


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Engine(members=[ScriptedMember(name, answer) for name in ("a", "b")]) as engine:
        with running(engine) as served:
            yield served


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=30) as made:
        yield made


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_ensemble_and_each_member_alone_are_models(client):
    assert [m.id for m in client.models.list()] == ["adafuse", "a", "b"]
    assert client.models.retrieve("b").id == "b"
    assert client.completions.create(model="b", prompt="Where?").choices[0].text == ANSWER


def test_a_completion_has_text_reason_and_usage(client):
    made = client.completions.create(model="adafuse", prompt="Where?", max_tokens=50)
    assert (made.choices[0].text, made.choices[0].finish_reason) == (ANSWER, "stop")
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens > 0
    assert [m["name"] for m in made.usage.model_extra["adafuse"]] == ["a", "b"]


def test_several_prompts_give_a_choice_each(client):
    made = client.completions.create(model="adafuse", prompt=["Where?", "Which?"])
    assert [(c.index, c.text) for c in made.choices] == [(0, ANSWER), (1, ANSWER)]


def test_streamed_texts_join_to_the_answer_and_the_usage_comes_last(client):
    chunks = list(
        client.completions.create(
            model="adafuse", prompt="Where?", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("stop") == 1
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens > 0) == ([], True)


def test_stop_and_max_tokens_end_the_text(client):
    assert client.completions.create(model="adafuse", prompt="?", stop=" is").choices[0].text == " Paris"
    short = client.completions.create(model="adafuse", prompt="?", max_tokens=1).choices[0]
    assert (short.finish_reason, len(short.text) < len(ANSWER)) == ("length", True)


def test_logprobs_tell_the_pieces_and_their_candidates(client):
    told = client.completions.create(
        model="adafuse", prompt="?", logprobs=3, extra_body={"gate": "never"}
    ).choices[0].logprobs  # fmt: skip
    assert "".join(told.tokens) == ANSWER
    assert all(value <= 0 for value in told.token_logprobs)
    assert all(token in top for token, top in zip(told.tokens, told.top_logprobs, strict=True) if top)
    assert told.text_offset == [sum(map(len, told.tokens[:i])) for i in range(len(told.tokens))]
    chat = client.chat.completions.create(model="adafuse", messages=user("?"), logprobs=True, top_logprobs=2)
    assert "".join(entry.token for entry in chat.choices[0].logprobs.content) == ANSWER


def test_a_chat_is_answered_whole_and_in_pieces(client):
    whole = client.chat.completions.create(model="adafuse", messages=user("Where?")).choices[0]
    assert (whole.message.content, whole.message.role, whole.finish_reason) == (ANSWER, "assistant", "stop")
    chunks = list(client.chat.completions.create(model="adafuse", messages=user("Where?"), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_tool_is_called_and_its_result_is_read(client):
    messages = user("What is the weather in Paris?")
    first = client.chat.completions.create(model="adafuse", messages=messages, tools=[WEATHER]).choices[0]
    assert first.finish_reason == "tool_calls"
    [call] = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    second = client.chat.completions.create(model="adafuse", messages=messages, tools=[WEATHER]).choices[0]
    assert (second.message.content.strip(), second.finish_reason) == ("It is sunny.", "stop")


def test_a_streamed_call_is_put_together_by_the_client(client):
    with client.chat.completions.stream(
        model="adafuse", messages=user("What is the weather in Paris?"), tools=[WEATHER]
    ) as stream:
        made = stream.get_final_completion().choices[0]
    assert made.finish_reason == "tool_calls"
    assert json.loads(made.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    assert not made.message.content


def test_a_response_format_holds_the_answer_to_its_schema(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    made = client.chat.completions.create(
        model="adafuse",
        messages=user("Is it?"),
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
    )
    assert isinstance(json.loads(made.choices[0].message.content)["ok"], bool)


async def test_the_asynchronous_client_works_too(server):
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", timeout=30) as client:
        stream = await client.chat.completions.create(model="adafuse", messages=user("Where?"), stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == ANSWER


def test_any_setting_of_the_engine_can_be_given(client):
    made = client.completions.create(model="adafuse", prompt="?", extra_body={"gate": "never", "trace": True})
    [told] = made.model_extra["adafuse"]
    assert told["trace"]["settings"]["gate"] == "never"


def test_langchain_openai_works_unmodified(server):
    model = ChatOpenAI(model="adafuse", base_url=server.url, api_key="none", max_retries=0, timeout=30)
    assert model.invoke([HumanMessage("Where?")]).content == ANSWER
    assert "".join(chunk.text for chunk in model.stream("Where?")) == ANSWER
    [call] = model.bind_tools([WEATHER]).invoke("What is the weather in Paris?").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})


def test_llama_index_openai_like_works_unmodified(server):
    llm = OpenAILike(model="adafuse", api_base=server.url, api_key="none", is_chat_model=True, max_retries=0)
    assert llm.chat([ChatMessage(role="user", content="Where?")]).message.content == ANSWER
    assert list(llm.stream_chat([ChatMessage(role="user", content="Where?")]))[-1].message.content == ANSWER
    plain = OpenAILike(model="adafuse", api_base=server.url, api_key="none", is_chat_model=False, max_retries=0)
    assert plain.complete("Where?").text == ANSWER
