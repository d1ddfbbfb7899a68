from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adafuse_engine.cache import HASHED_ALWAYS, MANIFEST, build_once, cache_folder, is_whole, sha256_of
from adafuse_engine.errors import LoadError

LARGE = HASHED_ALWAYS + 1


def build(scratch: Path) -> None:
    (scratch / "small").write_text("hello")
    (scratch / "large").write_bytes(b"x" * LARGE)
    (scratch / "deep").mkdir()
    (scratch / "deep" / "file").write_text("there")


def refuse(scratch: Path) -> None:
    raise AssertionError("built again")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_once(tmp_path / "cache" / "model", build)


def test_folder_is_built_whole_and_then_reused(folder: Path) -> None:
    assert (folder / "small").read_text() == "hello"
    assert is_whole(folder)
    assert build_once(folder, refuse) == folder


def test_all_files_can_be_read_by_whom_the_folder_can_be_read_by(tmp_path: Path) -> None:
    def private(scratch: Path) -> None:
        (scratch / "weights").write_text("x")
        (scratch / "weights").chmod(0o600)

    folder = build_once(tmp_path / "model", private)
    assert (folder / "weights").stat().st_mode == (folder / MANIFEST).stat().st_mode


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "small").write_text("hellO"),
        lambda f: (f / "large").write_bytes(b"x" * (LARGE - 1)),
        lambda f: (f / "deep" / "file").unlink(),
        lambda f: (f / MANIFEST).unlink(),
        lambda f: (f / MANIFEST).write_text("{"),
        lambda f: (f / MANIFEST).write_text("{}"),
        lambda f: (f / MANIFEST).write_text("[1]"),
        lambda f: (f / MANIFEST).write_text('{"small": 5}'),
    ],
    ids=["changed", "cut short", "missing", "no record", "half a record", "empty record", "list", "odd record"],
)
def test_damaged_folder_is_built_again(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder)
    assert not is_whole(folder)
    build_once(folder, build)
    assert is_whole(folder)
    assert (folder / "small").read_text() == "hello"


def test_build_that_fails_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    def fail(scratch: Path) -> None:
        (scratch / "half").write_text("x")
        raise LoadError("no")

    with pytest.raises(LoadError, match="no"):
        build_once(tmp_path / "model", fail)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    assert is_whole(build_once(tmp_path / "model", build))


def test_build_that_fails_leaves_the_lock_free_for_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        build_once(tmp_path / "model", refuse)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(build_once, tmp_path / "model", build).result(timeout=60)


def test_leftovers_of_a_killed_process_do_not_get_in(tmp_path: Path) -> None:
    left = tmp_path / ".model.part"
    left.mkdir()
    (left / "half").write_text("x")
    folder = build_once(tmp_path / "model", build)
    assert not (folder / "half").exists()
    assert not left.exists()


def test_threads_that_want_the_same_wait_for_one_that_builds(tmp_path: Path) -> None:
    builds: list[int] = []
    together = threading.Barrier(4)

    def counted(scratch: Path) -> None:
        builds.append(1)
        build(scratch)

    def want(_: int) -> Path:
        together.wait(timeout=60)
        return build_once(tmp_path / "model", counted)

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(want, range(4)))
    assert folders == [tmp_path / "model"] * 4
    assert builds == [1]


def test_processes_that_want_the_same_wait_for_one_that_builds(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from adafuse_engine.cache import build_once

def build(scratch):
    with open(sys.argv[2], "a") as file:
        file.write("built\\n")
    (scratch / "large").write_bytes(b"x" * (1 << 24))

print((build_once(Path(sys.argv[1]), build) / "large").stat().st_size)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model"), str(tmp_path / "log")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=90)[0] for process in running]
    assert said == [f"{1 << 24}\n"] * 3
    assert (tmp_path / "log").read_text() == "built\n"


def test_cache_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match=r"file.*ADAFUSE_CACHE") as caught:
        build_once(tmp_path / "file" / "model", build)
    assert isinstance(caught.value.__cause__, OSError)


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAFUSE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("ADAFUSE_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.delenv("ADAFUSE_CACHE")
    assert "adafuse" in cache_folder().parts


def test_record_holds_size_and_digest_of_every_file(folder: Path) -> None:
    record = json.loads((folder / MANIFEST).read_text())
    assert sorted(record) == ["deep/file", "large", "small"]
    assert record["large"] == [LARGE, sha256_of(folder / "large")]
