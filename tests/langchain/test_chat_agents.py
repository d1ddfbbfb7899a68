"""Agents and graphs on ChatAdaFuse: sync, async, streaming, with checkpoints."""

import itertools

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel, Field

from adafuse_engine import Engine
from adafuse_engine.testing import tool_call
from adafuse_integrations.langchain import ChatAdaFuse
from tests.support import tiny
from tests.support.bundled import BOTH


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


@tool
def clock() -> str:
    """The time."""
    return "Noon."


class Report(BaseModel):
    """What came of it."""

    summary: str = Field(max_length=30)
    sunny: bool


def an_agent_answers(prompt):
    """What a model that knows its tools says: a call, then an answer from the result."""
    last = prompt.splitlines()[-2]
    if last.startswith("tool: "):
        return f"It is {last.removeprefix('tool: ').lower()}"
    if "name" in last:
        return "You are Ann." if "I am Ann" in prompt else "I do not know."
    name, arguments = ("clock", {}) if "time" in last else ("weather", {"city": "Oslo"})
    return f"Let me look.\n{tool_call(name, arguments)}"


@pytest.fixture
def agent(make_engine):
    def make(**options):
        engine, *members = make_engine(an_agent_answers)
        chat = ChatAdaFuse(engine=engine)
        return create_agent(chat, [weather, clock], checkpointer=InMemorySaver(), **options), members

    return make


def thread(name):
    return {"configurable": {"thread_id": name}}


def said(state):
    return [(type(m).__name__, m.text) for m in state["messages"]]


WANTED = [
    ("HumanMessage", "How is it in Oslo?"),
    ("AIMessage", "Let me look."),
    ("ToolMessage", "Sunny in Oslo."),
    ("AIMessage", "It is sunny in oslo."),
]
QUESTION = {"messages": [("user", "How is it in Oslo?")]}


async def test_an_agent_calls_a_tool_and_answers_from_its_result(agent):
    made, _ = agent()
    assert said(made.invoke(QUESTION, thread("sync"))) == WANTED
    assert said(await made.ainvoke(QUESTION, thread("async"))) == WANTED


async def test_an_agents_messages_stream_while_they_are_written(agent):
    made, _ = agent()
    pieces = [m for m, _ in made.stream(QUESTION, thread("a"), stream_mode="messages")]
    texts = [m.text for m in pieces if isinstance(m, AIMessageChunk) and m.text]
    assert "".join(texts) == "Let me look.It is sunny in oslo."
    assert len(texts) > 2
    later = [m async for m, _ in made.astream(QUESTION, thread("b"), stream_mode="messages")]
    assert "".join(m.text for m in later if isinstance(m, AIMessageChunk)) == "".join(texts)
    assert any(isinstance(m, ToolMessage) for m in later)


def test_a_checkpointer_remembers_each_thread_apart(agent):
    made, _ = agent()
    made.invoke({"messages": [("user", "I am Ann. What is the time?")]}, thread("ann"))
    known = made.invoke({"messages": [("user", "What is my name?")]}, thread("ann"))
    unknown = made.invoke({"messages": [("user", "What is my name?")]}, thread("bob"))
    assert known["messages"][-1].text == "You are Ann."
    assert unknown["messages"][-1].text == "I do not know."


def test_answers_survive_a_checkpointers_serialiser(agent):
    made, _ = agent()
    message = made.invoke(QUESTION, thread("a"))["messages"][-1]
    serialiser = JsonPlusSerializer()
    back = serialiser.loads_typed(serialiser.dumps_typed(message))
    assert back == message
    assert back.response_metadata["adafuse_trace"]["members"] == ["a", "b"]


def test_an_agents_structured_answer_follows_its_schema():
    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
        chat = ChatAdaFuse(engine=engine, max_tokens=90)
        made = create_agent(chat, [], response_format=ToolStrategy(Report))
        assert isinstance(made.invoke(QUESTION)["structured_response"], Report)


async def test_a_graph_with_a_node_of_its_own(make_engine):
    engine, *_ = make_engine(an_agent_answers)
    chat = ChatAdaFuse(engine=engine).bind_tools([weather, clock])

    async def think(state: MessagesState):
        return {"messages": [await chat.ainvoke(state["messages"])]}

    def act(state: MessagesState):
        calls = state["messages"][-1].tool_calls
        return {"messages": [ToolMessage(weather.invoke(c["args"]), tool_call_id=c["id"]) for c in calls]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("act", act)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", lambda s: "act" if s["messages"][-1].tool_calls else END)
    graph.add_edge("act", "think")
    assert said(await graph.compile().ainvoke(QUESTION)) == WANTED


# ---- what conversations cost


def growing(chat, turns):
    """A conversation: how many prompt tokens each turn had, and how many of them were known already."""
    history, counts = [], []
    for turn in range(turns):
        history.append(("user", f"Question {turn}: what is {turn} and {turn}?"))
        answer = chat.invoke(history)
        history.append(AIMessage(answer.text))
        members = answer.response_metadata["usage"]["members"]
        counts.append([(m["prompt_tokens"], m["prompt_tokens_reused"], m["tokens_processed"]) for m in members])
    return counts


def holds_a_conversation_in_mind(counts):
    """From the second turn on only what is new is read: the end of the last answer, and the question."""
    for before, after in itertools.pairwise(counts):
        for (old, _, _), (prompt, reused, _) in zip(before, after, strict=True):
            # All of the turn before but a few tokens where the template closes or the tokens meet otherwise.
            assert reused >= old - 8
            assert prompt - reused < 80


def test_a_ten_turn_chat_reads_only_what_is_new():
    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
        counts = growing(ChatAdaFuse(engine=engine, max_tokens=6), 10)
    holds_a_conversation_in_mind(counts)
    assert counts[-1][0][1] > 10 * (counts[-1][0][0] - counts[-1][0][1]) / 2


@pytest.mark.real_models
@pytest.mark.timeout(300)
def test_a_ten_turn_chat_of_the_packaged_models_reads_only_what_is_new():
    holds_a_conversation_in_mind(growing(ChatAdaFuse(models=list(BOTH), max_tokens=6), 10))
