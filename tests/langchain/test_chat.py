"""ChatAdaFuse: messages, tools and structured answers, by every road."""

import asyncio
import json
import time
from typing import Annotated, TypedDict

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from adafuse_engine import Engine, InvalidArgumentError, PromptError, UnknownArgumentError
from adafuse_engine.chat import tool_form
from adafuse_engine.types import ToolCall
from adafuse_integrations.langchain import ChatAdaFuse
from tests.support import tiny
from tests.support.scripted import ENDLESS, NO_LIMIT, script_loading, wait_for

TAGS = tool_form("json_tags")


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


@tool
def clock() -> str:
    """The time."""
    return "Noon."


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def calling(*calls, text="", after=""):
    written = TAGS.write([ToolCall("", name, arguments) for name, arguments in calls])
    return f"{text}\n{written}\n{after}".strip()


ONE_CALL = calling(("weather", {"city": "Oslo"}), text="Let me look.")


def whole(chunks):
    full = None
    for chunk in chunks:
        full = chunk if full is None else full + chunk
    return full


@pytest.fixture
def chat(make_engine):
    def make(answer="I am well.", **options):
        engine, *members = make_engine(answer)
        return ChatAdaFuse(engine=engine, **options), *members

    return make


# ---- answers


async def test_every_road_gives_the_same_message(chat):
    model, *_ = chat(ONE_CALL)
    model = model.bind_tools([weather, clock])
    messages = [
        model.invoke("Hello"),
        await model.ainvoke("Hello"),
        whole(model.stream("Hello")),
        whole([c async for c in model.astream("Hello")]),
        model.batch(["Hello"])[0],
        (await model.abatch(["Hello"]))[0],
    ]
    for message in messages:
        assert message.content == "Let me look."
        [call] = message.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
        assert message.usage_metadata == messages[0].usage_metadata
        assert message.response_metadata["finish_reason"] == "tool_calls"
        assert message.response_metadata["model_name"] == "a+b"


def test_metadata_is_plain_json_and_holds_the_trace_under_one_key(chat):
    model, *_ = chat()
    metadata = model.invoke("Hello").response_metadata
    assert json.loads(json.dumps(metadata)) == metadata
    assert metadata["adafuse_trace"]["members"] == ["a", "b"]
    assert set(metadata) == {"model_name", "model_provider", "finish_reason", "usage", "adafuse_trace"}


def test_the_usage_callback_adds_up_what_was_used(chat):
    model, *_ = chat()
    callback = UsageMetadataCallbackHandler()
    used = [model.invoke("Hello", config={"callbacks": [callback]}).usage_metadata["total_tokens"]]
    used.append(whole(model.stream("Hello", config={"callbacks": [callback]})).usage_metadata["total_tokens"])
    assert callback.usage_metadata["a+b"]["total_tokens"] == sum(used)


def test_text_and_arguments_stream_while_they_are_written(chat):
    model, *_ = chat(
        calling(("weather", {"city": "Oslo and all that is around it", "days": 3}), text="Well, let me see.")
    )
    chunks = list(model.bind_tools([weather]).stream("Hello", max_words=1))
    texts = [c.content for c in chunks if c.content]
    arguments = [p["args"] for c in chunks for p in c.tool_call_chunks]
    assert len(texts) > 2
    assert len(arguments) > 4
    assert json.loads("".join(arguments)) == {"city": "Oslo and all that is around it", "days": 3}
    assert [c for c in chunks if c.usage_metadata] == [chunks[-1]]


def test_several_calls_of_one_answer_have_ids_of_their_own(chat):
    model, *_ = chat(calling(("weather", {"city": "Oslo"}), ("clock", {})))
    for message in (
        model.bind_tools([weather, clock]).invoke("x"),
        whole(model.bind_tools([weather, clock]).stream("x")),
    ):
        assert [c["name"] for c in message.tool_calls] == ["weather", "clock"]
        assert len({c["id"] for c in message.tool_calls}) == 2
        assert message.content == ""


def test_a_call_of_broken_json_is_an_invalid_call_and_no_exception(chat):
    # This form has no marks, so nothing holds a call to its schema under "auto".
    model, *_ = chat('{"name": "weather", "parameters": {"city": Oslo}}', tool_form="llama3_json")
    message = model.bind_tools([weather]).invoke("x")
    assert message.tool_calls == []
    [broken] = message.invalid_tool_calls
    assert broken["name"] == "weather"
    assert "Oslo" in broken["args"]
    assert "JSON" in broken["error"]
    streamed = whole(model.bind_tools([weather]).stream("x"))
    assert [c["name"] for c in streamed.invalid_tool_calls] == ["weather"]


def test_callbacks_hear_of_each_piece_once(chat):
    class Tokens(BaseCallbackHandler):
        def __init__(self):
            self.tokens = []

        def on_llm_new_token(self, token, **kwargs):
            self.tokens.append(token)

    model, *_ = chat("One two three four five.")
    heard = Tokens()
    pieces = [c.content for c in model.stream("x", config={"callbacks": [heard]})]
    assert "".join(heard.tokens) == "".join(pieces) == "One two three four five."


# ---- prompts


def test_tools_reach_the_prompt_and_none_keeps_them_out(chat):
    model, member, _ = chat()
    model.bind_tools([weather]).invoke("Hello")
    assert "The weather in a city." in member.prompts[-1]
    assert '"days"' in member.prompts[-1]
    model.bind_tools([weather], tool_choice="none").invoke("Hello")
    assert "The weather in a city." not in member.prompts[-1]


def test_with_none_no_call_is_written_not_even_as_text(chat):
    model, *_ = chat(ONE_CALL)
    message = model.bind_tools([weather], tool_choice="none").invoke("Hello")
    assert message.tool_calls == []
    assert "<tool_call>" not in message.content


def test_a_history_may_hold_several_system_messages_and_end_in_a_tools_result(chat):
    model, member, _ = chat("It is sunny.")
    history = [
        SystemMessage("Be brief."),
        HumanMessage("Weather?"),
        SystemMessage("Be kind."),
        AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Oslo"}, "id": "c1", "type": "tool_call"}]),
        ToolMessage("Sunny in Oslo.", tool_call_id="c1"),
    ]
    assert model.bind_tools([weather]).invoke(history).content == "It is sunny."
    for words in ("Be brief.", "Be kind.", '"city": "Oslo"', "Sunny in Oslo."):
        assert words in member.prompts[-1]


def test_text_blocks_are_text_and_other_blocks_are_refused(chat):
    model, member, _ = chat()
    model.invoke([HumanMessage([{"type": "text", "text": "Hello "}, "there"])])
    assert "Hello there" in member.prompts[-1]
    with pytest.raises(PromptError, match=r"message 0 .*'image_url'"):
        model.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])])


def test_an_answer_can_be_given_back_with_its_broken_calls(chat):
    model, member, _ = chat()
    broken = {"name": "weather", "args": "{city", "id": "c1", "error": "no", "type": "invalid_tool_call"}
    history = [
        HumanMessage("x"),
        AIMessage("", invalid_tool_calls=[broken]),
        ToolMessage("No such.", tool_call_id="c1"),
    ]
    model.invoke(history)
    assert "{city" in member.prompts[-1]


def test_a_role_of_ones_own_is_refused_unless_it_is_known(chat):
    model, *_ = chat()
    assert model.invoke([ChatMessage("x", role="user")]).content == "I am well."
    with pytest.raises(InvalidArgumentError, match="'narrator'"):
        model.invoke([ChatMessage("x", role="narrator")])


# ---- choices and schemas

CHOICES = ["any", "required", True, "weather", {"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_forced_call_is_valid_whatever_the_members_would_say(choice):
    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
        model = ChatAdaFuse(engine=engine, max_tokens=120).bind_tools([weather, clock], tool_choice=choice)
        for message in (model.invoke("Hello"), whole(model.stream("Hello"))):
            assert message.tool_calls
            assert not message.invalid_tool_calls
            assert {c["name"] for c in message.tool_calls} <= {"weather", "clock"}
            if choice not in ("any", "required", True):
                assert [c["name"] for c in message.tool_calls] == ["weather"]


@pytest.mark.parametrize("choice", ["nobody", 7, {"type": "function"}])
def test_a_choice_that_no_tool_has_is_refused(chat, choice):
    model, *_ = chat()
    with pytest.raises(InvalidArgumentError, match="tool_choice"):
        model.bind_tools([weather], tool_choice=choice)


def test_any_without_tools_is_refused(chat):
    model, *_ = chat()
    with pytest.raises(InvalidArgumentError, match="no tools"):
        model.invoke("x", tool_choice="any")


def test_tools_may_be_tools_functions_classes_and_dicts(chat):
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    named = {"type": "function", "function": {"name": "plain", "parameters": {"type": "object", "properties": {}}}}
    model, member, _ = chat()
    model.bind_tools([weather, add, Person, named]).invoke("x")
    for name in ("weather", "add", "Person", "plain"):
        assert f'"name": "{name}"' in member.prompts[-1]


class Pair(TypedDict):
    """Two words."""

    left: Annotated[str, ..., "The first."]
    right: Annotated[str, ..., "The second."]


SCHEMAS = {"pydantic": Person, "typed dict": Pair, "json schema": Person.model_json_schema()}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_structured_answers_follow_the_schema_whatever_the_members_would_say(schema, method):
    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
        model = ChatAdaFuse(engine=engine, max_tokens=90).with_structured_output(schema, method=method)
        for found in (model.invoke("Who?"), await model.ainvoke("Who?")):
            if schema is Person:
                assert isinstance(found, Person)
            else:
                assert set(found) == ({"left", "right"} if schema is Pair else {"name", "age"})


def test_include_raw_gives_the_message_and_what_went_wrong(chat):
    model, *_ = chat('{"name": "Ann", "age": 30}')
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Person, method=method, include_raw=True).invoke("x")
        assert isinstance(answer["raw"], AIMessage)
        assert isinstance(answer["parsed"], Person)
        assert answer["parsing_error"] is None
    answer = model.with_structured_output(Pair, method="json_mode", include_raw=True).invoke("x")
    assert answer["parsed"] == {"name": "Ann", "age": 30}  # some object: json_mode holds to no schema
    model, *_ = chat('{"name": "Ann", "age": 300}')
    answer = model.with_structured_output(Person, method="json_mode", include_raw=True).invoke("x")
    assert answer["parsed"] is None
    assert answer["parsing_error"] is not None


def test_the_schema_is_told_to_the_members(chat):
    model, member, _ = chat('{"name": "Ann", "age": 30}')
    model.with_structured_output(Person).invoke([SystemMessage("Be exact."), HumanMessage("Who?")])
    assert member.prompts[-1].index("Be exact.") < member.prompts[-1].index('"maxLength": 20')


def test_stop_strings_end_free_answers_and_leave_schemas_alone(chat):
    model, *_ = chat('{"name": "Ann", "age": 30}', stop=[","])
    assert model.invoke("x").content == '{"name": "Ann"'
    assert model.with_structured_output(Person).invoke("x") == Person(name="Ann", age=30)


def test_an_unknown_method_format_or_argument_is_refused(chat):
    model, *_ = chat()
    with pytest.raises(InvalidArgumentError, match="method"):
        model.with_structured_output(Person, method="magic")
    with pytest.raises(InvalidArgumentError, match="response_format"):
        model.invoke("x", response_format={"type": "xml"})
    with pytest.raises(InvalidArgumentError, match="not both"):
        model.bind_tools([weather]).invoke("x", response_format={"type": "json_object"})
    with pytest.raises(UnknownArgumentError, match="max_tokens"):
        model.invoke("x", max_token=3)
    with pytest.raises(UnknownArgumentError, match="tool_form"):
        ChatAdaFuse(engine=model.engine, tool_from="x")
    with pytest.raises(UnknownArgumentError, match="json_tags"):
        model.bind_tools([weather]).invoke("x", tool_form="jsontags")


# ---- settings


def test_configured_copies_do_not_load_again(monkeypatch):
    loaded = script_loading(monkeypatch)
    model = ChatAdaFuse(models=["one", "two"]).configurable_fields(
        temperature=ConfigurableField(id="temperature"), max_tokens=ConfigurableField(id="most")
    )
    model.invoke("x")
    model.with_config(configurable={"temperature": 0.5, "most": 3}).invoke("x")
    assert len(loaded) == 1


def test_call_time_settings_take_effect_and_are_traced(chat):
    model, *_ = chat("One two three four five six.")
    message = model.invoke("x", max_tokens=2, threshold=0.2)
    assert message.usage_metadata["output_tokens"] == 2
    assert message.response_metadata["finish_reason"] == "length"
    assert message.response_metadata["adafuse_trace"]["settings"]["threshold"] == 0.2


def test_timeout_is_a_deadline_that_never_fails(chat):
    model, *_ = chat("One two three.", timeout=0.000001)
    message = model.invoke("x")
    assert message.content
    assert message.response_metadata["adafuse_trace"]["settings"]["deadline_s"] == 0.000001


def test_an_api_key_shows_nowhere(chat):
    model, *_ = chat(api_key="hush-hush")
    for shown in (repr(model), str(model), json.dumps(model.model_dump(mode="json"), default=repr)):
        assert "hush" not in shown


def test_the_profile_says_what_it_can_do_without_loading(chat):
    assert ChatAdaFuse(models=["never/loaded"]).profile["tool_calling"]
    model, *_ = chat(max_tokens=33)
    assert model.profile["max_input_tokens"] == 4096
    assert model.profile["max_output_tokens"] == 33


def test_drawn_answers_are_not_kept_in_the_global_cache(chat):
    set_llm_cache(InMemoryCache())
    try:
        model, member, _ = chat()
        for options, more in (({}, 1), ({"temperature": 0.7}, 2), ({"temperature": 0.7, "seed": 1}, 1)):
            before = len(member.prompts)
            for _ in range(2):
                model.invoke("x", **options)
            assert len(member.prompts) - before == more, options
    finally:
        set_llm_cache(None)


def test_token_counts_are_the_first_members(chat):
    model, member, _ = chat()
    assert model.get_num_tokens("one two three") == len(member.tokenize("one two three"))


# ---- many at once, and stopping


async def test_the_event_loop_keeps_ticking_while_eight_callers_are_served(chat):
    model, *_ = chat(calling(("weather", {"city": "Oslo"})), max_tokens=200)
    model = model.bind_tools([weather], tool_choice="any")
    gaps, last, done = [], time.perf_counter(), False

    async def tick():
        nonlocal last
        while not done:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    answers = await asyncio.gather(*(model.ainvoke(f"Hello {i}") for i in range(8)))
    done = True
    await ticking
    assert all(a.tool_calls for a in answers)
    assert len(gaps) > 1


def test_closing_a_stream_stops_the_engine(make_engine):
    engine, member, _ = make_engine(**ENDLESS)
    source = ChatAdaFuse(engine=engine).bind_tools([weather]).stream("x", max_tokens=NO_LIMIT)
    assert isinstance(next(source), AIMessageChunk)
    source.close()
    wait_for(lambda: member.open_sessions == 0)


async def test_cancelling_a_task_stops_the_engine(make_engine):
    engine, member, _ = make_engine(**ENDLESS)
    task = asyncio.create_task(ChatAdaFuse(engine=engine).ainvoke("x", max_tokens=NO_LIMIT))
    while not member.open_sessions:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_for, lambda: member.open_sessions == 0)


def test_one_failing_conversation_of_a_batch_fails_alone(chat):
    model, *_ = chat()
    image = HumanMessage([{"type": "image", "url": "x"}])
    first, second, third = model.batch([["hi"], [image], ["hi"]], return_exceptions=True)
    assert first.content == third.content == "I am well."
    assert isinstance(second, PromptError)
