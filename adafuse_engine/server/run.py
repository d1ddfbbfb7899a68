"""A server in this process, from the file that says what it serves until it is told to stop."""

from __future__ import annotations

import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from adafuse_engine.config import ServerConfig
from adafuse_engine.engine import Engine
from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.server.app import create_app

__all__ = ["serve"]


class _Server(uvicorn.Server):
    """Tells its application when it was asked to stop, before running requests have ended."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own handler: it raises the signal again at the end, and nothing would be closed.
        self._app.state.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(engine: Engine, config: ServerConfig) -> None:
    """Serve the engine until SIGTERM or SIGINT.

    Running requests then have ``drain_s`` seconds to end, and none after a second signal.
    Raises `InvalidArgumentError` where the address cannot be listened at.
    """
    app = create_app(engine, config)
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot listen at {config.host}:{config.port}: {error.strerror or error}; choose another --port"
        ) from error
    with listener:
        host = f"[{config.host}]" if ":" in config.host else config.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        print(f"serving {config.model_name} ({', '.join(engine.member_names)}) at {url}/v1", flush=True)
        settings = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=config.drain_s, server_header=False, lifespan="on"
        )
        _Server(settings, app).run(sockets=[listener])
