"""Bytes in, text out: whole characters, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["Output"]


class Output:
    """Bytes in, text out: whole characters, up to a stop string, holding back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.released = ""
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, data: bytes) -> tuple[str, bool]:
        """The text that can be released now, and whether a stop string came."""
        self._held += self._decoder.decode(data)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            released, self._held = self._held[: min(found)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            released = self._held[: len(self._held) - keep]
            self._held = self._held[len(released) :]
        self.released += released
        return released, bool(found)

    def flush(self) -> str:
        """What was held back and can be released at the end; a cut character is left out."""
        held, self._held = self._held, ""
        self.released += held
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` and is not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
