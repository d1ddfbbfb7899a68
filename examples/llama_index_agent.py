"""A LlamaIndex agent with two tools, on two small models.

Models of this size do not know when to call a tool. So the step after a question must call one, and the step
after a result must not. The call is then well-formed whatever the models would say, but
which tool they choose, with what arguments, and what they make of its result, is up to them: this question goes
well, many others do not. Larger models need no such subclass.
"""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ToolCall,
    ToolCallResult,
)
from llama_index.core.tools import FunctionTool

from adafuse_engine import MemberConfig
from adafuse_integrations.llama_index import AdaFuseLLM

MODELS = [MemberConfig(model="bundled:gemma-3-270m", weight=3.0), "bundled:smollm2-135m-instruct"]
TIMES = {"torvey": "06:50 and 17:30", "skarn": "07:40 and 18:20", "brae": "09:15"}


def departures(harbour: str) -> str:
    """When the ferries leave a harbour."""
    found = [f"Ferries leave {name.title()} at {time}." for name, time in TIMES.items() if name in harbour.lower()]
    return " ".join(found) or f"There is no harbour called {harbour}."


def fare(passenger: str) -> str:
    """What a ticket costs for a kind of passenger."""
    return f"A ticket for {passenger} costs 12 pounds."


class OneCallPerQuestion(AdaFuseLLM):
    """A question is followed by a call, a result by an answer."""

    def _prepare_chat_with_tools(
        self, tools: Any, user_msg: Any = None, chat_history: Any = None, **options: Any
    ) -> dict[str, Any]:
        answering = bool(chat_history) and chat_history[-1].role == "tool"
        options["tool_choice"] = "none" if answering else "any"
        return super()._prepare_chat_with_tools(tools, user_msg, chat_history, **options)


def make_workflow(llm: AdaFuseLLM) -> AgentWorkflow:
    """A workflow of one agent."""
    agent = FunctionAgent(
        name="clerk",
        # Without the functions' signatures, which small models copy words from.
        tools=[FunctionTool.from_defaults(f, description=f.__doc__) for f in (departures, fare)],
        llm=llm,
        allow_parallel_tool_calls=False,
    )
    return AgentWorkflow(agents=[agent])


async def main() -> None:
    workflow = make_workflow(OneCallPerQuestion(models=MODELS, max_tokens=48, stop=["\n"]))
    question = "When do ferries leave Skarn?"
    print(question)
    handler = workflow.run(question)
    async for event in handler.stream_events():
        if isinstance(event, ToolCallResult):
            print(f"  result: {event.tool_output.content}")
        elif isinstance(event, ToolCall):
            print(f"  calls {event.tool_name}({event.tool_kwargs})")
        elif isinstance(event, AgentStream) and event.delta:
            print(event.delta, end="", flush=True)
    print(f"\nThe answer: {await handler}")


if __name__ == "__main__":
    asyncio.run(main())
