"""The Python in the documentation runs, in the order in which it stands on its page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REAL = pytest.mark.real_models


def blocks(page):
    """The page's Python, each block at its own lines, so that a traceback points into the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        yield "\n" * text.count("\n", 0, found.start(1)) + found[1]


def an_index():
    from llama_index.core import Document, MockEmbedding, VectorStoreIndex

    return VectorStoreIndex.from_documents([Document(text="Ann founded it.")], embed_model=MockEmbedding(4))


GIVEN = {"README.md": {"index": an_index}}
"""What a page says that the reader has."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", ["docs/testing.md", pytest.param("docs/agents.md", marks=REAL), pytest.param("README.md", marks=REAL)]
)
def test_the_python_on_a_page_runs(page, capsys):
    names = {name: make() for name, make in GIVEN.get(page, {}).items()} | {"__name__": page}
    found = list(blocks(page))
    assert found
    for source in found:
        exec(compile(source, page, "exec"), names)


@pytest.mark.parametrize(
    "page", [path.relative_to(ROOT) for path in ROOT.glob("docs/*.md")] + ["README.md"], ids=str
)
def test_links_between_files_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_every_behaviour_is_held_by_tests_that_exist():
    page = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    exist = set(re.findall(r"def (test_\w+)", tests))
    assert set(re.findall(r"`(test_\w+)`", page)) <= exist
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| behaviour")]
    assert all("`test_" in row for row in rows)
