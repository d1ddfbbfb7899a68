"""``adafuse``: the commands, and how their errors are shown."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated

import typer

from adafuse_engine.cli import models
from adafuse_engine.cli.calibrate import calibrate_command
from adafuse_engine.cli.generate import generate
from adafuse_engine.cli.serve import serve_command
from adafuse_engine.errors import AdaFuseError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Several language models answer as one, word by word.",
)
app.command()(generate)
app.command("calibrate")(calibrate_command)
app.command("serve")(serve_command)
app.add_typer(models.app, name="models")
for found in entry_points(group="adafuse.commands"):
    # Commands of what is built on the engine.
    app.command(found.name)(found.load())


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is done, on standard error.")] = False,
) -> None:
    """Several language models answer as one, word by word."""
    if show_version:
        try:
            print(version("adafuse-integrations"))
        except PackageNotFoundError:
            print("unknown: run from a checkout that is not installed")
        raise typer.Exit
    if verbose:
        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
        logging.getLogger("adafuse_engine").setLevel(logging.INFO)


def main() -> None:
    """Run the command line; an error of ours is one line on standard error and exit status 1."""
    try:
        app()
    except AdaFuseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
