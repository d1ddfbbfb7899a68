"""The user's cache folder: files that appear whole or not at all, and are known to be what they were."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

__all__ = ["build_once", "cache_folder", "is_whole", "sha256_of"]

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
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if is_whole(folder):
            return folder
        with _scratch(folder) as scratch:
            build(scratch)
            files = [p for p in sorted(scratch.rglob("*")) if p.is_file()]
            manifest = {str(p.relative_to(scratch)): (p.stat().st_size, sha256_of(p)) for p in files}
            (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
            if folder.exists():
                shutil.rmtree(folder)
            scratch.rename(folder)
    return folder


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    # Left over from a killed process; the lock says that nobody is at it now.
    for old in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(old, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
    finally:
        with suppress(OSError):
            shutil.rmtree(scratch)
