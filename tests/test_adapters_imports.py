"""Importing an adapter brings in its own framework alone, never torch; a missing one names its extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(code: str) -> str:
    """Run code in a fresh interpreter; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("adafuse_integrations", ["torch", "transformers", "langchain_core", "llama_index"]),
        ("adafuse_integrations.langchain", ["torch", "llama_index", "langchain"]),
        ("adafuse_integrations.llama_index", ["torch", "langchain_core"]),
    ],
)
def test_import_leaves_out_what_is_not_used(module: str, absent: list[str]) -> None:
    found = run(f"import sys, {module}; print([m for m in {absent} if m in sys.modules])")
    assert found == "[]"


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [
        ("adafuse_integrations.langchain", "langchain_core", "langchain"),
        ("adafuse_integrations.llama_index", "llama_index", "llama-index"),
        ("adafuse_integrations.llama_index", "llama_index.core", "llama-index"),
    ],
)
def test_missing_framework_names_the_extra(module: str, framework: str, extra: str) -> None:
    message = run(
        f"import sys; sys.modules[{framework!r}] = None\n"
        f"try:\n    import {module}\nexcept ImportError as e:\n    print(type(e).__name__, e)"
    )
    assert message.startswith("MissingExtraError")
    assert f"pip install 'adafuse-integrations[{extra}]'" in message


def test_broken_framework_is_not_called_missing() -> None:
    message = run(
        "import sys; sys.modules['tenacity'] = None\n"
        "try:\n    import adafuse_integrations.langchain.llm\n"
        "except ImportError as e:\n    print(type(e).__name__, e)"
    )
    assert message.startswith("ModuleNotFoundError")
    assert "tenacity" in message


def test_version_is_told() -> None:
    from adafuse_integrations import __version__

    assert __version__[0].isdigit()
