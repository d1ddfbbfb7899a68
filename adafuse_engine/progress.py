"""Progress of slow steps: a bar in a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["track"]

log = logging.getLogger("adafuse_engine")


@contextmanager
def track(label: str, total: float, *, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """Show how far a step is. Gives a function to call with what was done since the last call.

    In a terminal a bar on standard error, otherwise an INFO line of the logger ``adafuse_engine`` at the start
    and at the end. ``total`` is in any unit.
    """
    if not enabled:
        yield lambda done: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.advance(task, done)
    else:
        started = perf_counter()
        log.info("%s ...", label)
        yield lambda done: None
        log.info("%s: done in %.1f s", label, perf_counter() - started)
