"""How answers look in a terminal: words coloured by confidence, a line per fused round, the usage."""

from __future__ import annotations

import string
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import regex
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

__all__ = ["HIGH", "LOW", "WordPrinter", "confidence_colour", "trace_lines", "usage_line"]

HIGH = 0.7
"""At or above it a word is green; it is also the default threshold at which a member is certain."""
LOW = 0.4
"""Below it a word is red; between the two it is yellow."""

# A model may write escape sequences; a terminal would obey them.
_UNPRINTABLE = regex.compile(r"[\p{Cc}--[\n\t]]", flags=regex.V1)


def confidence_colour(confidence: float) -> str:
    """``green``, ``yellow`` or ``red``."""
    if confidence >= HIGH:
        return "green"
    return "yellow" if confidence >= LOW else "red"


class WordPrinter:
    """Writes words as they come: coloured in a terminal, unchanged to a file or a pipe.

    Parameters
    ----------
    stream
        Where to; standard output if None.
    colour
        True or False decides; None looks at the stream, ``NO_COLOR``, ``FORCE_COLOR`` and ``TERM``.
    """

    def __init__(self, stream: TextIO | None = None, *, colour: bool | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        console = Console(file=self.stream)
        self.terminal = console.is_terminal
        if colour is None:
            colour = self.terminal and console.color_system is not None and not console.no_color
        self.colour = colour

    def write(self, text: str, confidence: float) -> None:
        """Write ``text`` in the colour of ``confidence`` at once."""
        if self.terminal or self.colour:
            text = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
        if self.colour and text.strip():
            style = Style(color=confidence_colour(confidence))
            text = style.render(text, color_system=ColorSystem.STANDARD)
        self.stream.write(text)
        self.stream.flush()

    def end_line(self) -> None:
        """End the answer's line."""
        self.stream.write("\n")
        self.stream.flush()


def trace_lines(trace: Mapping[str, Any], most: int = 4) -> Iterable[str]:
    """A legend, then one line per round that the members' scores decided.

    Parameters
    ----------
    trace
        What ``Trace.to_dict()`` gives, as it also stands in the adapters' results.
    most
        Candidates shown per line, the committed one first, then by fused score.
    """
    names = list(trace["members"])
    letters = dict(zip(names, _letters(len(names)), strict=True))
    weights = zip(names, trace["weights"], strict=True)
    legend = ", ".join(f"{letters[name]} = {name} (weight {weight:.2f})" for name, weight in weights)
    rounds = [r for r in trace["rounds"] if r["fused"]]
    yield f"{len(rounds)} of {len(trace['rounds'])} rounds fused. {legend}"
    if lowered := [r["service"] for r in trace["rounds"] if r.get("service")]:
        because = ", ".join(dict.fromkeys(service["because"] for service in lowered))
        yield f"{len(lowered)} of {len(trace['rounds'])} rounds fused less, or not at all, because of {because}."
    if rounds:
        order = " ".join(letters.values())
        yield f"Per candidate: who proposed it, its text, its log-probability in nats under {order}."
    for r in rounds:
        winner = r["candidates"][r["winner"]]
        rest = [c for i, c in enumerate(r["candidates"]) if i != r["winner"]]
        rest.sort(key=lambda c: -float("inf") if c["score"] is None else c["score"], reverse=True)
        shown = [_candidate(c, letters) for c in [winner, *rest][:most]]
        left_out = len(r["candidates"]) - len(shown)
        more = f" | {left_out} more" if left_out > 0 else ""
        yield f"{r['index']:>4} {_quoted(r['text'], r['end']):<16} <- {' | '.join(shown)}{more}"


def usage_line(usage: Mapping[str, Any]) -> str:
    """Tokens in and out, and what each member did for them."""
    parts = [f"{usage['prompt_tokens']} prompt + {usage['completion_tokens']} completion tokens"]
    parts += [
        f"{m['name']}: {m['tokens_processed']} tokens in {m['forward_passes']} forwards, {m['seconds']:.1f} s"
        for m in usage.get("members", ())
    ]
    return "; ".join(parts)


def _letters(count: int) -> list[str]:
    if count <= len(string.ascii_uppercase):
        return list(string.ascii_uppercase[:count])
    return [f"M{i + 1}" for i in range(count)]


def _candidate(candidate: Mapping[str, Any], letters: Mapping[str, str]) -> str:
    who = "+".join(letters[name] for name in candidate["proposers"])
    scores = " ".join(_number(candidate["scores"].get(name)) for name in letters)
    return f"{who} {_quoted(candidate['text'], candidate['end'])} ({scores})"


def _number(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"


def _quoted(text: str, end: bool) -> str:
    """The text with its spaces and control characters visible, and a mark where the answer ends."""
    return repr(text) * bool(text) + "<end>" * end or "''"
