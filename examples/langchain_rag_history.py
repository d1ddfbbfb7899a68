"""A LangChain chain that looks things up and remembers the conversation, on two small models.

Each question is looked up in the handbook of a ferry company; the passages go into the system message, the
conversation so far before the question. ``cache_read`` in the usage counts the tokens of the prompt that an
earlier turn had computed already.
"""

from __future__ import annotations

from typing import Any

from corpus import load_sections
from embeddings import LangChainMiniLM, MiniLM
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from adafuse_integrations.langchain import ChatAdaFuse

MODELS = ["bundled:smollm2-135m-instruct", "bundled:gemma-3-270m"]
QUESTIONS = ["Who founded Torvey Harbour Ferries?", "And what was her first boat called?"]


def make_chain(chat: ChatAdaFuse, embeddings: LangChainMiniLM) -> Runnable[dict[str, Any], AIMessage]:
    """Look up, put together with the history, answer."""
    store = InMemoryVectorStore(embeddings)
    store.add_texts([section.text for section in load_sections()])
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "Answer in one sentence, from this passage:\n\n{passage}"),
            MessagesPlaceholder("history"),
            ("user", "{question}"),
        ]
    )

    def look_up(given: dict[str, Any]) -> str:
        # What "her" means stands in the question before: both are looked up together.
        asked = [m.text for m in given["history"] if isinstance(m, HumanMessage)][-1:]
        [found] = store.similarity_search(" ".join([*asked, given["question"]]), k=1)
        return found.page_content

    return RunnablePassthrough.assign(passage=look_up) | prompt | chat


def main() -> None:
    chain = make_chain(ChatAdaFuse(models=MODELS, max_tokens=40, stop=["\n"]), LangChainMiniLM(MiniLM()))
    history: list[BaseMessage] = []
    for question in QUESTIONS:
        answer = chain.invoke({"question": question, "history": history})
        history += [HumanMessage(question), answer]
        used = answer.usage_metadata
        known = used["input_token_details"]["cache_read"]
        print(f"{question}\n  {answer.text.strip()}")
        print(f"  {used['input_tokens']} tokens in, {known} of them known from earlier turns")


if __name__ == "__main__":
    main()
