"""``adafuse serve``: the ensemble of a configuration file behind OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from adafuse_engine.configfile import read_config, read_server
from adafuse_engine.engine import Engine
from adafuse_engine.errors import MissingExtraError

__all__ = ["serve_command"]


def serve_command(
    config: Annotated[str, typer.Argument(help="The configuration file, e.g. adafuse.toml.")],
    host: Annotated[
        str | None, typer.Option(help="Where to listen; 0.0.0.0 for all networks.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[int | None, typer.Option(help="0 chooses a free one.", show_default="8000")] = None,
) -> None:
    """Serve the ensemble of CONFIG over HTTP, for any client of OpenAI's API."""
    given: dict[str, Any] = {"host": host, "port": port}
    settings = read_server(config)
    changed = {**settings.model_dump(), **{k: v for k, v in given.items() if v is not None}}
    settings = type(settings)(**changed)
    members = read_config(config)
    try:
        # Only who serves needs what the extra brings.
        from adafuse_engine.server.run import serve
    except ImportError as error:
        raise MissingExtraError("the server", "server") from error
    with Engine(members) as engine:
        serve(engine, settings)
