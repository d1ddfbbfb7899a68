"""``adafuse generate``: one prompt, answered by an ensemble, on the terminal or as JSON."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any

import typer

from adafuse_engine.cli.show import WordPrinter, trace_lines, usage_line
from adafuse_engine.config import DEFAULT_MODELS, DecodingConfig, EngineConfig, member_configs
from adafuse_engine.engine import Engine
from adafuse_engine.errors import AdaFuseError
from adafuse_engine.types import Completion

__all__ = ["generate", "unescape"]

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A member: a Hugging Face id, a folder, a .gguf file or bundled:NAME. Repeat for more.",
            show_default="the two bundled models",
        ),
    ] = None,
    weight: Annotated[
        list[float] | None,
        typer.Option("--weight", "-w", help="A member's weight; once per --model, in their order."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="default, or paper for the published method.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Confidence at which a member is certain.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to write.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help=r"End the text before this string (\n and \t are understood). Repeat for more."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Above 0, draw among the candidates.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes draws repeatable.")] = None,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", help="Seconds to be done in; fuses less where they are short.")
    ] = None,
    words_per_second: Annotated[float | None, typer.Option(help="A pace to keep, by fusing less.")] = None,
    max_forward_passes: Annotated[int | None, typer.Option(help="Most forwards, all members together.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document, trace included.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Show who proposed what, and the usage.")] = False,
) -> None:
    """Answer PROMPT with several models at once, word by word; each word is coloured by confidence."""
    given: dict[str, Any] = {
        "preset": preset,
        "threshold": threshold,
        "max_tokens": max_tokens,
        "stop": [unescape(s) for s in stop] if stop else None,
        "temperature": temperature,
        "seed": seed,
        "deadline_s": deadline_s,
        "words_per_second": words_per_second,
        "max_forward_passes": max_forward_passes,
    }
    options = {name: value for name, value in given.items() if value is not None}
    try:
        members = member_configs(model or list(DEFAULT_MODELS), weight or [])
        config = EngineConfig(members=members, decoding=DecodingConfig(**options), prepare_grammars=False)
        text = _read_stdin() if prompt == "-" else prompt
        with Engine(config) as engine:
            if json_:
                document = engine.generate(text).to_dict()
                print(json.dumps(document, ensure_ascii=False, allow_nan=False))
                return
            completion = _stream(engine, text)
    except AdaFuseError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
    if trace:
        print()
        for line in trace_lines(completion.trace.to_dict()):
            print(line)
        print(usage_line(completion.usage.to_dict()))


def _stream(engine: Engine, prompt: str) -> Completion:
    printer = WordPrinter()
    completion: Completion | None = None
    try:
        for chunk in engine.stream(prompt):
            printer.write(chunk.text, chunk.confidence)
            completion = chunk.completion
    finally:
        printer.end_line()
    if completion is None:
        raise RuntimeError("the stream ended without a completion")
    return completion


def unescape(text: str) -> str:
    """Escapes, like those of a new line or a tab, as what they stand for."""
    return re.sub(r"\\([nrt\\])", lambda match: _ESCAPES[match[1]], text)


def _read_stdin() -> str:
    return sys.stdin.read().removesuffix("\n")
