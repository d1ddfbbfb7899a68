"""Fixtures and rules for all tests: no network, one thread, and the marks ``real_models`` and ``gpu``."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

# Before anything imports transformers or torch, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_cuda():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("real_models") and (missing := missing_models()):
        reason = f"not fetched: {', '.join(missing)}; run: adafuse models fetch --all"
        if models_required():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@functools.cache
def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@functools.cache
def missing_models() -> tuple[str, ...]:
    """The packaged models that are not in the cache."""
    from adafuse_engine import bundled

    return tuple(name for name in bundled.NAMES if not bundled.is_fetched(name))


def models_required() -> bool:
    ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return ci or os.environ.get("ADAFUSE_REQUIRE_MODELS") == "1"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Question sets that may lie beside the repository: for measurements, never needed."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder ../shared/data beside the repository")
    return folder
