"""``adafuse models``: the packaged models, and fetching them ahead of time."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from adafuse_engine.bundled import MODELS, PREFIX, BundledModel, bundled, fetch, is_fetched
from adafuse_engine.cache import cache_folder
from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.members.local.gguf import converted, is_converted

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The models that come as packages.")


@app.command("list")
def list_models(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the packaged models and whether they are in the cache."""
    states = {model: _state(model) for model in MODELS.values()}
    if json_:
        rows = [
            {
                "name": PREFIX + model.name,
                "title": model.title,
                "licence": model.licence,
                "megabytes": model.megabytes,
                "fetched": state != "absent",
                "converted": state == "ready",
            }
            for model, state in states.items()
        ]
        print(json.dumps(rows))
        return
    table = Table(Column("Name", no_wrap=True), "Model", "Licence", Column("MB", justify="right"), "State")
    for model, state in states.items():
        table.add_row(PREFIX + model.name, model.title, model.licence, str(model.megabytes), state)
    console = Console()
    console.print(table)
    console.print(f"cache: {cache_folder()}", soft_wrap=True)


@app.command("fetch")
def fetch_models(
    names: Annotated[list[str] | None, typer.Argument(help="Which models, as bundled:NAME or NAME.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Fetch models into the cache and convert them, so that later nothing is needed from outside."""
    chosen = list(MODELS) if all_ else [bundled(name).name for name in names or []]
    if not chosen:
        raise InvalidArgumentError(f"which model? give a name ({', '.join(MODELS)}) or --all")
    for name in chosen:
        converted(fetch(name))
        print(f"{PREFIX}{name}: ready")


def _state(model: BundledModel) -> str:
    """``absent``, ``fetched`` (its first use still converts it) or ``ready``."""
    if not is_fetched(model.name):
        return "absent"
    return "ready" if is_converted(fetch(model.name, progress=False)) else "fetched"
