"""One load at a time, without the progress bars of others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import modeling_gguf_pytorch_utils as gguf_loader
from transformers.utils import logging

__all__ = ["exclusive"]

_lock = threading.Lock()


@contextmanager
def exclusive(*, bars: bool) -> Iterator[None]:
    """Keep other threads from loading: transformers sets the process's default dtype while it builds a model.

    ``bars=False`` keeps its progress bars away as well.
    """
    with _lock:
        if bars:
            yield
            return
        shown = logging.is_progress_bar_enabled()
        # The GGUF reader goes past the switch that the rest of transformers heeds.
        plain = getattr(gguf_loader, "tqdm", None)
        logging.disable_progress_bar()
        if plain is not None:
            gguf_loader.tqdm = functools.partial(plain, disable=True)
        try:
            yield
        finally:
            if plain is not None:
                gguf_loader.tqdm = plain
            if shown:
                logging.enable_progress_bar()
