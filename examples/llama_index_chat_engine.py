"""A LlamaIndex chat engine that looks things up and remembers the conversation, on two small models."""

from __future__ import annotations

from corpus import load_sections
from embeddings import LlamaIndexMiniLM, MiniLM
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer

from adafuse_integrations.llama_index import AdaFuseLLM

MODELS = ["bundled:smollm2-135m-instruct", "bundled:gemma-3-270m"]
QUESTIONS = ["What was the first boat called?", "Who built it?"]


def make_engine(llm: AdaFuseLLM, embeddings: LlamaIndexMiniLM) -> ContextChatEngine:
    """Retrieves a passage for each message, and puts it and the conversation so far before it."""
    index = VectorStoreIndex.from_documents(
        [Document(text=section.text) for section in load_sections()],
        embed_model=embeddings,
        transformations=[],
    )
    return ContextChatEngine.from_defaults(
        retriever=index.as_retriever(similarity_top_k=1),
        llm=llm,
        memory=ChatMemoryBuffer.from_defaults(token_limit=1000, tokenizer_fn=llm.tokenizer),
        context_template="Answer in one short sentence, from this passage:\n\n{context_str}",
    )


def main() -> None:
    engine = make_engine(
        AdaFuseLLM(models=MODELS, max_tokens=40, stop=["\n"], is_chat_model=True), LlamaIndexMiniLM(MiniLM())
    )
    for question in QUESTIONS:
        print(f"{question}\n ", end="")
        for piece in engine.stream_chat(question).response_gen:
            print(piece, end="", flush=True)
        print()
    print(f"The engine remembers {len(engine.chat_history)} messages.")


if __name__ == "__main__":
    main()
