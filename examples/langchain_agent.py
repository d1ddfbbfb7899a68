"""A LangChain agent with two tools and a memory, on two small models.

Models of this size do not know when to call a tool. So the first step of each question must call one, and the
step after its result must not. The call is then well-formed whatever the models would say, but which tool they
choose, with what arguments, and what they make of its result, is up to them: these two questions go well, many
others do not. Larger models need no such middleware.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from adafuse_engine import MemberConfig
from adafuse_integrations.langchain import ChatAdaFuse

MODELS = [
    MemberConfig(model="bundled:gemma-3-270m", weight=3.0),
    MemberConfig(model="bundled:smollm2-135m-instruct"),
]
TIMES = {"torvey": "06:50 and 17:30", "skarn": "07:40 and 18:20", "brae": "09:15"}
PRICES = {"adult": 12, "child": 6, "dog": 3}


@tool
def departures(harbour: str) -> str:
    """When the ferries leave a harbour."""
    found = [
        f"Ferries leave {name.title()} at {times}." for name, times in TIMES.items() if name in harbour.lower()
    ]
    return " ".join(found) or f"There is no harbour called {harbour}."


@tool
def fare(passenger: str) -> str:
    """What a ticket costs for a kind of passenger."""
    found = [f"A ticket for a {kind} costs {price} pounds." for kind, price in PRICES.items() if kind in passenger]
    return " ".join(found) or f"There are tickets for {', '.join(PRICES)}, and none for {passenger}."


class OneCallPerQuestion(AgentMiddleware):
    """A question is followed by a call, a result by an answer."""

    def wrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
    ) -> ModelResponse:
        return handler(_steered(request))

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        return await handler(_steered(request))


def _steered(request: ModelRequest) -> ModelRequest:
    last = request.messages[-1]
    return request.override(
        tool_choice="any" if isinstance(last, HumanMessage) else "none",
        model_settings={"parallel_tool_calls": False},
    )


def make_agent(chat: ChatAdaFuse) -> Any:
    """The agent, with a checkpointer that remembers each thread."""
    return create_agent(
        chat,
        [departures, fare],
        middleware=[OneCallPerQuestion()],
        checkpointer=InMemorySaver(),
    )


def show(message: Any) -> None:
    for call in getattr(message, "tool_calls", []):
        print(f"  calls {call['name']}({call['args']})")
    if isinstance(message, ToolMessage):
        print(f"  result: {message.text}")
    elif message.text:
        print(f"  {message.type}: {message.text}")


async def main() -> None:
    agent = make_agent(ChatAdaFuse(models=MODELS, max_tokens=48, stop=["\n"]))

    print("Asked and answered:")
    first = {"configurable": {"thread_id": "first passenger"}}
    done = agent.invoke({"messages": [("user", "What does a ticket for a dog cost?")]}, first)
    for message in done["messages"]:
        show(message)

    print("In a thread of its own, step by step:")
    second = {"configurable": {"thread_id": "second passenger"}}
    question = {"messages": [("user", "When do ferries leave Skarn?")]}
    async for step in agent.astream(question, second, stream_mode="updates"):
        for update in step.values():
            for message in (update or {}).get("messages", []):
                show(message)

    for thread in (first, second):
        remembered = (await agent.aget_state(thread)).values["messages"]
        print(f"The thread of the {thread['configurable']['thread_id']} holds {len(remembered)} messages.")


if __name__ == "__main__":
    asyncio.run(main())
