"""A LangGraph graph that sorts letters to a ferry company: a structured answer, then a road that depends on it.

The first node's answer is held to a schema, so it is always one of the kinds that the graph knows. That it is the
right kind is up to the models; two small ones are often wrong.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

from adafuse_integrations.langchain import ChatAdaFuse

MODELS = ["bundled:smollm2-135m-instruct", "bundled:gemma-3-270m"]
LETTERS = [
    "I left my umbrella on the boat last night. It is green.",
    "What time does the first ferry leave on Sunday?",
]


class Letter(BaseModel):
    """A letter from a passenger."""

    kind: Literal["lost property", "timetable", "complaint"]
    about: str = Field(description="what it is about, in a few words", max_length=40)


class State(TypedDict, total=False):
    letter: str
    sorted: Letter
    reply: str


def make_graph(chat: ChatAdaFuse) -> Any:
    """Sort, then reply by one of two roads."""
    sorter = chat.with_structured_output(Letter)

    def sort(state: State) -> State:
        return {"sorted": sorter.invoke(f"Sort this letter from a passenger.\n\n{state['letter']}")}

    def reply(state: State) -> State:
        answer = chat.invoke([("system", "Answer the letter politely in one sentence."), ("user", state["letter"])])
        return {"reply": answer.text.strip()}

    def forward(state: State) -> State:
        return {"reply": f"(put on the desk of the harbour master: {state['sorted'].about})"}

    graph = StateGraph(State)
    for node in (sort, reply, forward):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "sort")
    graph.add_conditional_edges("sort", lambda s: "forward" if s["sorted"].kind == "complaint" else "reply")
    graph.add_edge("reply", END)
    graph.add_edge("forward", END)
    return graph.compile()


def main() -> None:
    graph = make_graph(ChatAdaFuse(models=MODELS, max_tokens=40, stop=["\n"]))
    for letter in LETTERS:
        done = graph.invoke({"letter": letter})
        print(f"{letter}\n  sorted as: {done['sorted'].kind} ({done['sorted'].about})\n  {done['reply']}")


if __name__ == "__main__":
    main()
