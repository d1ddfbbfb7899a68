"""lm-eval's own command line, with the model ``adafuse`` registered: ``python -m adafuse_integrations.lm_eval``."""

from lm_eval.__main__ import cli_evaluate

import adafuse_integrations.lm_eval

__all__ = ["adafuse_integrations"]

if __name__ == "__main__":
    cli_evaluate()
