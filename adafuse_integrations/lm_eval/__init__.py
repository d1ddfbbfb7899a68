"""lm-eval: an ensemble as a model of EleutherAI's evaluation harness. Needs ``adafuse-integrations[eval]``.

Importing this registers the model ``adafuse``. The harness finds no plugins by itself, so its command line is run
as ``python -m adafuse_integrations.lm_eval``, with the same arguments.
"""

from pathlib import Path

from adafuse_integrations._shared import require

require("lm_eval", "lm-eval", extra="eval")

from adafuse_integrations.lm_eval.model import AdaFuseLM  # noqa: E402 - after the check above

__all__ = ["TASKS", "AdaFuseLM"]

TASKS = Path(__file__).parent / "tasks"
"""Definitions of five tasks over local files, for ``--include_path``."""
