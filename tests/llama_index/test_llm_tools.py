"""Tools, agents and structured answers on AdaFuseLLM, by every road of LlamaIndex."""

import asyncio
import json

import pytest
from llama_index.core import Settings
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.memory import Memory
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from adafuse_engine import Engine, InvalidArgumentError
from adafuse_engine.chat import tool_form
from adafuse_engine.types import ToolCall
from adafuse_integrations.llama_index import AdaFuseLLM
from tests.support import tiny
from tests.support.scripted import ENDLESS, NO_LIMIT, wait_for

TAGS = tool_form("json_tags")
USER = [ChatMessage("How is the weather?", role="user")]


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


def clock() -> str:
    """The time."""
    return "Noon."


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


TOOLS = [FunctionTool.from_defaults(weather), FunctionTool.from_defaults(clock)]


def calling(*calls, text=""):
    return f"{text}\n{TAGS.write([ToolCall('', name, arguments) for name, arguments in calls])}".strip()


def an_agent_answers(prompt):
    """What a model that knows its tools says: a call, then an answer from its result."""
    last = prompt.splitlines()[-2]
    if last.startswith("tool: "):
        return f"It is {last.removeprefix('tool: ').lower()}"
    return calling(("weather", {"city": "Oslo"}), text="Let me look.")


@pytest.fixture
def llm(make_engine):
    def make(answer="I am well.", **options):
        engine, *members = make_engine(answer)
        return AdaFuseLLM(engine=engine, **options), *members

    return make


def calls_of(response):
    return [(b.tool_name, b.tool_kwargs) for b in response.message.blocks if isinstance(b, ToolCallBlock)]


# ---- function calling


async def test_every_road_gives_the_same_text_and_calls(llm):
    model, *_ = llm(calling(("weather", {"city": "Oslo"}), text="Let me look."))
    assert isinstance(model, FunctionCallingLLM)
    assert model.metadata.is_function_calling_model
    asked = {"tools": TOOLS, "chat_history": USER}
    responses = [
        model.chat_with_tools(**asked),
        await model.achat_with_tools(**asked),
        list(model.stream_chat_with_tools(**asked))[-1],
        [r async for r in await model.astream_chat_with_tools(**asked)][-1],
    ]
    for response in responses:
        assert response.message.content == "Let me look."
        assert calls_of(response) == [("weather", {"city": "Oslo"})]
        [call] = model.get_tool_calls_from_response(response)
        assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Oslo"})
        assert call.tool_id
        assert response.raw["usage"] == responses[0].raw["usage"]
        assert response.message.additional_kwargs == {}


def test_calls_can_be_read_from_every_piece_of_a_stream(llm):
    model, *_ = llm(calling(("weather", {"city": "Oslo and all around it"}), text="Well now."))
    seen, text = [], ""
    for response in model.stream_chat_with_tools(TOOLS, chat_history=USER, max_words=1):
        text += response.delta
        assert (response.message.content or "") == text
        for call in model.get_tool_calls_from_response(response, error_on_no_tool_call=False):
            assert call.tool_name == "weather"
            seen.append(call.tool_kwargs.get("city", ""))
    assert text == "Well now."
    assert seen[-1] == "Oslo and all around it"
    assert len(set(seen)) > 2
    assert all(seen[-1].startswith(s) for s in seen)


def test_no_call_is_an_error_if_one_was_asked_for(llm):
    model, *_ = llm("No.")
    response = model.chat_with_tools(TOOLS, chat_history=USER)
    assert model.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="No"):
        model.get_tool_calls_from_response(response)


def test_broken_json_is_no_exception_and_no_call(llm):
    # This form has no marks, so nothing holds a call to its schema unless one is required.
    model, *_ = llm('{"name": "weather", "parameters": {"city": Oslo}}', tool_form="llama3_json")
    for response in (
        model.chat_with_tools(TOOLS, chat_history=USER),
        list(model.stream_chat_with_tools(TOOLS, chat_history=USER))[-1],
    ):
        assert model.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
        assert "Oslo" in str(response.message.blocks)
        model.chat([*USER, response.message])  # and can be given back


def test_parallel_calls_are_held_to_one_unless_allowed():
    with Engine(members=[tiny.member("llama", "a", 1)]) as engine:
        model = AdaFuseLLM(engine=engine, max_tokens=150)
        response = model.chat_with_tools(TOOLS, chat_history=USER, tool_required=True)
        assert len(model.get_tool_calls_from_response(response)) == 1


@pytest.mark.parametrize("kinds", [["llama"], ["llama", "gemma"]], ids="-".join)
def test_a_required_call_is_valid_whatever_the_members_would_say(kinds):
    with Engine(members=[tiny.member(kind, f"m{i}", i) for i, kind in enumerate(kinds)]) as engine:
        model = AdaFuseLLM(engine=engine, max_tokens=120)
        for choice in ({"tool_required": True}, {"tool_choice": "weather"}, {"tool_choice": "required"}):
            response = model.chat_with_tools(TOOLS, user_msg="Hello", **choice)
            for call in model.get_tool_calls_from_response(response):
                assert call.tool_name in ("weather", "clock")
                assert set(call.tool_kwargs) == ({"city"} if call.tool_name == "weather" else set())
    with pytest.raises(InvalidArgumentError, match="nobody"):
        model.chat_with_tools(TOOLS, user_msg="Hello", tool_choice="nobody")


def test_a_history_with_calls_and_results_reaches_the_members(llm):
    model, member, _ = llm()
    history = [
        *USER,
        ChatMessage(
            role=MessageRole.ASSISTANT,
            blocks=[
                TextBlock(text="I look."),
                ToolCallBlock(tool_call_id="c1", tool_name="weather", tool_kwargs={"city": "Oslo"}),
            ],
        ),
        ChatMessage("Sunny.", role=MessageRole.TOOL, additional_kwargs={"tool_call_id": "c1"}),
    ]
    model.chat_with_tools(TOOLS, chat_history=history)
    for words in ("I look.", '"city": "Oslo"', "Sunny.", "The weather in a city."):
        assert words in member.prompts[-1]


def test_one_call_with_tools_is_one_event(llm):
    class Seen(BaseEventHandler):
        events: list = Field(default_factory=list)

        def handle(self, event, **kwargs):
            if isinstance(event, LLMChatStartEvent | LLMChatEndEvent):
                self.events.append(type(event).__name__)

    seen, dispatcher = Seen(), get_dispatcher()
    dispatcher.add_event_handler(seen)
    try:
        model, *_ = llm(calling(("clock", {})))
        model.chat_with_tools(TOOLS, chat_history=USER)
        list(model.stream_chat_with_tools(TOOLS, chat_history=USER))
    finally:
        dispatcher.event_handlers.remove(seen)
    assert seen.events == ["LLMChatStartEvent", "LLMChatEndEvent"] * 2


# ---- structured answers


async def test_structured_answers_are_objects_whatever_the_members_would_say():
    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
        model = AdaFuseLLM(engine=engine, max_tokens=120)
        prompt = PromptTemplate("Who is {who}?")
        assert isinstance(model.structured_predict(Person, prompt, who="it"), Person)
        assert isinstance(await model.astructured_predict(Person, prompt, who="it"), Person)
        assert isinstance(model.as_structured_llm(Person).chat(USER).raw, Person)
        *_, last = model.stream_structured_predict(Person, prompt, who="it")
        assert Person.model_validate(last.model_dump())
        *_, last = [p async for p in await model.astream_structured_predict(Person, prompt, who="it")]
        assert Person.model_validate(last.model_dump())


def test_a_response_format_is_followed():
    with Engine(members=[tiny.member("llama", "a", 1)]) as engine:
        model = AdaFuseLLM(engine=engine, max_tokens=120)
        for format_ in (Person, {"type": "json_schema", "json_schema": {"schema": Person.model_json_schema()}}):
            assert Person.model_validate_json(model.chat(USER, response_format=format_).message.content)
        assert isinstance(
            json.loads(model.chat(USER, response_format={"type": "json_object"}).message.content), dict
        )
        with pytest.raises(InvalidArgumentError, match="response_format"):
            model.chat(USER, response_format="json")


# ---- agents


async def test_a_function_agent_calls_its_tool_and_answers_from_the_result(llm):
    model, member, _ = llm(an_agent_answers)
    for streaming in (True, False):
        agent = FunctionAgent(tools=TOOLS, llm=model, system_prompt="Be kind.", streaming=streaming)
        handler = agent.run("How is the weather in Oslo?")
        results, said = [], ""
        async for event in handler.stream_events():
            if isinstance(event, ToolCallResult):
                results.append((event.tool_name, event.tool_kwargs, str(event.tool_output)))
            elif isinstance(event, AgentStream):
                said += event.delta
        assert str(await handler) == "It is sunny in oslo."
        assert results == [("weather", {"city": "Oslo"}, "Sunny in Oslo.")]
        assert not streaming or said == "Let me look.It is sunny in oslo."
    assert member.prompts[-1].count("Be kind.") == 1


async def test_a_workflow_picks_the_function_agent(llm):
    model, *_ = llm(an_agent_answers)
    workflow = AgentWorkflow.from_tools_or_functions([weather, clock], llm=model)
    [agent] = workflow.agents.values()
    assert isinstance(agent, FunctionAgent)
    assert str(await workflow.run("How is the weather?")) == "It is sunny in oslo."


async def test_weak_members_can_be_made_to_call_first():
    with Engine(members=[tiny.member("llama", "a", 1)]) as engine:
        model = AdaFuseLLM(engine=engine, max_tokens=60)
        agent = FunctionAgent(tools=TOOLS, llm=model, initial_tool_choice="clock")
        handler = agent.run("What time is it?")
        called = [e.tool_name async for e in handler.stream_events() if isinstance(e, ToolCallResult)]
        await handler
        assert called[0] == "clock"


async def test_react_stops_before_an_observation_by_itself(llm):
    def answer(prompt):
        if "Observation: Sunny" in prompt:
            return "Thought: I can answer without using any more tools.\nAnswer: It is sunny."
        return (
            'Thought: I need to use a tool.\nAction: weather\nAction Input: {"city": "Oslo"}\n'
            "Observation: It rains frogs.\nThought: I can answer.\nAnswer: It rains frogs."
        )

    model, *_ = llm(answer)
    agent = ReActAgent(tools=TOOLS, llm=model)
    assert "sunny" in str(await agent.run("How is the weather in Oslo?"))


def test_a_stop_of_the_call_wins_over_reacts(llm):
    model, *_ = llm("One. Two.\nObservation: three. Four.")
    react = ChatMessage("Thought: Action: Action Input: Observation:", role="system")
    assert model.chat([react, *USER]).message.content == "One. Two."
    assert model.chat([react, *USER], stop=["Four"]).message.content == "One. Two.\nObservation: three. "
    assert "Four" in model.chat(USER).message.content


# ---- chat engines and settings


def test_a_chat_engine_remembers_and_sends_each_message_once(llm):
    model, member, _ = llm()
    engine = SimpleChatEngine.from_defaults(llm=model, memory=Memory.from_defaults(), system_prompt="Be kind.")
    engine.chat("First.")
    assert "".join(engine.stream_chat("Second.").response_gen) == "I am well."
    engine.chat("Third.")
    remembers_once(member.prompts[-1])


async def test_a_chat_engine_remembers_for_async_callers_too(llm):
    model, member, _ = llm()
    engine = SimpleChatEngine.from_defaults(llm=model, memory=Memory.from_defaults(), system_prompt="Be kind.")
    await engine.achat("First.")
    answer = await engine.astream_chat("Second.")
    assert "".join([piece async for piece in answer.async_response_gen()]) == "I am well."
    await engine.achat("Third.")
    remembers_once(member.prompts[-1])


def remembers_once(prompt):
    for words in ("Be kind.", "First.", "Second.", "Third."):
        assert prompt.count(words) == 1
    assert prompt.count("I am well.") == 2


def test_settings_take_the_llm_and_its_tokenizer(llm):
    model, member, _ = llm()
    before = Settings._llm, Settings._tokenizer
    try:
        Settings.llm = model
        Settings.tokenizer = model.tokenizer
        assert Settings.llm is model
        assert Settings.tokenizer("one two three") == member.tokenize("one two three")
    finally:
        Settings._llm, Settings._tokenizer = before


async def test_a_stream_with_tools_leaves_the_event_loop_free_and_stops_when_closed(make_engine):
    engine, member, _ = make_engine(**ENDLESS)
    model = AdaFuseLLM(engine=engine)
    source = await model.astream_chat_with_tools(TOOLS, chat_history=USER, max_tokens=NO_LIMIT)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    for _ in range(3):
        await anext(source)
    assert ticks > 3
    ticking.cancel()
    await source.aclose()
    await asyncio.to_thread(wait_for, lambda: member.open_sessions == 0)
