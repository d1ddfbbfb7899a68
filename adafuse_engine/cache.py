"""The user's cache folder: files that appear whole or not at all, and are known to be what they were."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from adafuse_engine.errors import LoadError

__all__ = ["build_once", "cache_folder", "is_whole", "sha256_of"]

log = logging.getLogger("adafuse_engine")

MANIFEST = "adafuse-manifest.json"
# Files up to this size are hashed each time; of larger ones the size, and the hash when they are made.
HASHED_ALWAYS = 4 * 2**20


def cache_folder() -> Path:
    """Where models are kept: ``$ADAFUSE_CACHE``, or ``adafuse`` in the user's cache folder."""
    chosen = os.environ.get("ADAFUSE_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("adafuse")


def sha256_of(path: Path, advance: Callable[[float], None] = lambda done: None) -> str:
    """Hex digest of a file; ``advance`` is told the bytes read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether the folder was finished and its files are still as they were then."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, (size, digest) in manifest.items():
            path = folder / name
            if path.stat().st_size != size or (size <= HASHED_ALWAYS and sha256_of(path) != digest):
                return False
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    return bool(manifest)


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """The folder, filled by ``build`` unless it is there and whole.

    Safe against other threads and processes that want the same: one builds, the others wait. ``build`` gets an
    empty folder beside the final place; what it leaves there appears whole or, if it raises, not at all. A
    damaged folder is built again.

    Raises what ``build`` raises, and `LoadError` where the cache cannot be written.
    """
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not is_whole(folder):
                _build(folder, build)
    except OSError as error:
        raise LoadError(
            f"the cache folder {folder.parent} cannot be written: {error}; free some space there, "
            "or set ADAFUSE_CACHE to another folder"
        ) from error
    return folder


def _locked(folder: Path) -> AbstractContextManager[object]:
    """Hold ``folder`` against all other threads and processes until the context is left."""
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that prepares %s ...", folder.name)
        return lock.acquire()


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    # The lock is held: what lies here was left by a process that was killed.
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        build(scratch)
        manifest = {}
        for path in sorted(p for p in scratch.rglob("*") if p.is_file()):
            manifest[str(path.relative_to(scratch))] = (path.stat().st_size, sha256_of(path))
        record = scratch / MANIFEST
        record.write_text(json.dumps(manifest, indent=1))
        for name in manifest:
            # safetensors writes for its user alone; a cache may be shared, or copied into an image.
            shutil.copymode(record, scratch / name)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
