from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import adafuse_engine
import adafuse_integrations

HEAVY = ("torch", "transformers", "langchain_core", "langchain", "llama_index")

FRAMEWORKS = {"langchain": "langchain_core", "llama_index": "llama_index"}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what this one has imported must not count."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("package", ["adafuse_engine", "adafuse_engine.testing", "adafuse_integrations"])
def test_import_loads_neither_torch_nor_a_framework(package: str) -> None:
    done = run_python(f"import sys, {package}; print(*[m for m in {HEAVY} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize(("adapter", "other"), [("langchain", "llama_index"), ("llama_index", "langchain_core")])
def test_import_of_an_adapter_loads_only_its_own_framework(adapter: str, other: str) -> None:
    done = run_python(f"import sys, adafuse_integrations.{adapter}; print({other!r} in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("adapter", "extra"), [("langchain", "langchain"), ("llama_index", "llama-index")])
def test_missing_framework_is_an_import_error_that_names_the_extra(adapter: str, extra: str) -> None:
    done = run_python(
        f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {FRAMEWORKS[adapter]!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
try:
    import adafuse_integrations.{adapter}
except ImportError as error:
    print(type(error).__name__, error)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MissingExtraError"), done.stdout
    assert f"adafuse-integrations[{extra}]" in done.stdout


@pytest.mark.parametrize("package", [adafuse_engine, adafuse_integrations])
def test_packages_are_marked_as_typed(package: object) -> None:
    assert (Path(str(package.__file__)).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    "module",
    [
        "adafuse_engine",
        "adafuse_engine.config",
        "adafuse_engine.errors",
        "adafuse_engine.testing",
        "adafuse_engine.trace",
        "adafuse_engine.types",
        "adafuse_integrations.langchain",
        "adafuse_integrations.llama_index",
    ],
)
def test_exported_names_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__all__
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


def test_adapters_export_the_documented_classes() -> None:
    assert importlib.import_module("adafuse_integrations.langchain").AdaFuseLLM
    assert importlib.import_module("adafuse_integrations.llama_index").AdaFuseLLM


def test_command_line_entry_point_exists() -> None:
    try:
        importlib.metadata.distribution("adafuse-integrations")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from a checkout that is not installed")
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="adafuse")
    assert entry.value == "adafuse_engine.cli.main:main"
    assert callable(entry.load())
