"""One question, two frameworks, one ensemble: ``make demo``.

Two small models answer a question about the handbook of a ferry company, first inside a LangChain chain, then
inside a LlamaIndex query engine. Both use the same engine, so the models are in memory once. Words are
coloured by confidence as they arrive; below each answer stands who proposed what.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from corpus import Section, load_sections
from embeddings import LangChainMiniLM, LlamaIndexMiniLM, MiniLM
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document as IndexDocument
from llama_index.core import PromptTemplate as IndexPromptTemplate
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMCompletionInProgressEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.node_parser import SentenceSplitter
from pydantic import PrivateAttr

from adafuse_engine import AdaFuseError, Engine
from adafuse_engine.cli.show import WordPrinter, trace_lines, usage_line
from adafuse_integrations.langchain import AdaFuseLLM as LangChainAdaFuse
from adafuse_integrations.llama_index import AdaFuseLLM as LlamaIndexAdaFuse

MODELS = ["bundled:smollm2-135m-instruct", "bundled:gemma-3-270m"]
# Chosen because models of this size get them right; they get many others wrong, as --question soon shows.
QUESTIONS = ["Who founded Torvey Harbour Ferries?", "How many blasts of the horn is the general alarm?"]
PASSAGES = 2
# Short and without instructions: models of this size continue a text better than they follow an order.
TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"
OPTIONS: dict[str, Any] = {"max_tokens": 40, "stop": ["\n"]}


class Report:
    """Prints the words of one answer as they come, then how it came about."""

    def __init__(self, printer: WordPrinter) -> None:
        self.printer = printer
        self.text = ""

    def sources(self, names: list[str]) -> None:
        print(f"  passages from {', '.join(dict.fromkeys(names))}")
        print("  answer:", end="", flush=True)

    def word(self, text: str, confidence: float) -> None:
        self.text += text
        self.printer.write(text, confidence)

    def end(self, info: dict[str, Any]) -> None:
        """``info``: what the adapters put beside the last piece of an answer."""
        self.printer.end_line()
        for line in trace_lines(info["adafuse_trace"]):
            print(f"  {line}")
        print(f"  {usage_line(info['usage'])}")


class LangChainWatcher(BaseCallbackHandler):
    """Chains pass on bare strings; confidence and trace come with the callbacks."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        self._report.sources([d.metadata["source"] for d in documents])

    def on_llm_new_token(self, token: str, *, chunk: Any = None, **kwargs: Any) -> None:
        info = chunk.generation_info or {}
        for word in info.get("adafuse_chunks", ()):
            self._report.word(word["text"], word["confidence"])
        if "adafuse_trace" in info:
            self._report.end(info)


class LlamaIndexWatcher(BaseEventHandler):
    """The same for LlamaIndex, whose query engines pass on bare strings too."""

    _report: Report = PrivateAttr()

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            self._report.sources([n.metadata["source"] for n in event.nodes])
        if isinstance(event, LLMCompletionInProgressEvent):
            raw = event.response.raw or {}
            if "adafuse_chunk" in raw:
                self._report.word(event.response.delta or "", raw["adafuse_chunk"]["confidence"])
            if "adafuse_trace" in raw:
                self._report.end(raw)


def langchain_chain(engine: Engine, sections: Sequence[Section], model: MiniLM) -> Runnable[str, str]:
    documents = [Document(s.text, metadata={"source": s.source}) for s in sections]
    store = InMemoryVectorStore.from_documents(documents, LangChainMiniLM(model))
    retriever = store.as_retriever(search_kwargs={"k": PASSAGES})
    prompt = PromptTemplate.from_template(TEMPLATE)
    llm = LangChainAdaFuse(engine=engine, **OPTIONS)
    return {"context": retriever | _join, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()


def llama_index_engine(engine: Engine, sections: Sequence[Section], model: MiniLM) -> BaseQueryEngine:
    documents = [IndexDocument(text=s.text, metadata={"source": s.source}) for s in sections]
    for document in documents:
        document.excluded_llm_metadata_keys = document.excluded_embed_metadata_keys = ["source"]
    llm = LlamaIndexAdaFuse(engine=engine, **OPTIONS)
    splitter = SentenceSplitter(chunk_size=512, tokenizer=llm.tokenizer)
    index = VectorStoreIndex.from_documents(
        documents, embed_model=LlamaIndexMiniLM(model), transformations=[splitter]
    )
    template = IndexPromptTemplate(
        TEMPLATE, template_var_mappings={"context_str": "context", "query_str": "question"}
    )
    return index.as_query_engine(llm=llm, streaming=True, similarity_top_k=PASSAGES, text_qa_template=template)


def ask_langchain(chain: Runnable[str, str], question: str, printer: WordPrinter) -> str:
    report = Report(printer)
    for _ in chain.stream(question, config={"callbacks": [LangChainWatcher(report)]}):
        pass  # the watcher prints
    return report.text


def ask_llama_index(query_engine: BaseQueryEngine, question: str, printer: WordPrinter) -> str:
    report = Report(printer)
    dispatcher = get_dispatcher()
    watcher = LlamaIndexWatcher(report)
    dispatcher.add_event_handler(watcher)
    try:
        for _ in query_engine.query(question).response_gen:
            pass  # the watcher prints
    finally:
        dispatcher.event_handlers.remove(watcher)
    return report.text


def _join(documents: Sequence[Document]) -> str:
    return "\n\n".join(d.page_content for d in documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", action="append", help="ask this instead; may be repeated")
    parser.add_argument("--plain", action="store_true", help="no colours")
    args = parser.parse_args()
    printer = WordPrinter(colour=False if args.plain else None)
    sections, model = load_sections(), MiniLM()
    with Engine.from_models(MODELS) as engine:
        chain = langchain_chain(engine, sections, model)
        query_engine = llama_index_engine(engine, sections, model)
        if printer.colour:
            print("confidence:", end="")
            for name, confidence in (("high", 1.0), ("middling", 0.5), ("low", 0.0)):
                printer.write(f" {name}", confidence)
            print()
        for question in args.question or QUESTIONS:
            print(f"\nQuestion: {question}\nLangChain")
            ask_langchain(chain, question, printer)
            print("LlamaIndex")
            ask_llama_index(query_engine, question, printer)


if __name__ == "__main__":
    try:
        main()
    except AdaFuseError as error:
        raise SystemExit(f"error: {error}") from error
