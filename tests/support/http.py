"""A server of the ensemble on a thread of this process, at a real port."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from adafuse_engine import Engine
from adafuse_engine.config import ServerConfig
from adafuse_engine.server import create_app
from tests.support.scripted import wait_for


@dataclass(frozen=True)
class Running:
    """A server that answers at ``root``."""

    root: str
    app: FastAPI
    server: uvicorn.Server

    @property
    def url(self) -> str:
        """What clients of OpenAI's API take as base_url."""
        return self.root + "/v1"

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the server's metrics; 0 where there is none yet."""
        return self.app.state.metrics.registry.get_sample_value(name, labels) or 0.0

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Ask without any client library."""
        return httpx.post(self.root + path, json=body, timeout=30, **options)


@contextlib.contextmanager
def running(engine: Engine, **config: Any) -> Iterator[Running]:
    """Serve the engine; stops the server, and not the engine, at the end."""
    app = create_app(engine, ServerConfig(**config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app, server)
        finally:
            server.should_exit = True
            thread.join(10)
