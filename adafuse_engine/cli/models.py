"""``adafuse models``: the packaged models, and fetching them ahead of time."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from adafuse_engine.bundled import MODELS, PREFIX, bundled, is_fetched
from adafuse_engine.cache import cache_folder
from adafuse_engine.errors import InvalidArgumentError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The models that come as packages.")


@app.command("list")
def list_models(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the packaged models and whether they are in the cache."""
    rows = [
        {
            "name": PREFIX + model.name,
            "title": model.title,
            "licence": model.licence,
            "megabytes": model.megabytes,
            "fetched": is_fetched(model.name),
        }
        for model in MODELS.values()
    ]
    if json_:
        print(json.dumps(rows))
        return
    table = Table("Name", "Model", "Licence", "MB", "Fetched")
    for row in rows:
        table.add_row(
            str(row["name"]),
            str(row["title"]),
            str(row["licence"]),
            str(row["megabytes"]),
            "yes" if row["fetched"] else "no",
        )
    console = Console()
    console.print(table)
    console.print(f"cache: {cache_folder()}", soft_wrap=True)


@app.command()
def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Which models, as bundled:NAME or NAME.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Fetch models into the cache and convert them, so that later nothing is needed from outside."""
    chosen = list(MODELS) if all_ else [bundled(name).name for name in names or []]
    if not chosen:
        raise InvalidArgumentError(f"which model? give a name ({', '.join(MODELS)}) or --all")
    # Imports torch, which listing does without.
    from adafuse_engine.members.local.loading import source_of

    for name in chosen:
        source_of(PREFIX + name)
        print(f"{PREFIX}{name}: ready")
