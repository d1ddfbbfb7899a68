"""LlamaIndex: an ensemble as an LLM. Needs ``pip install 'adafuse-integrations[llama-index]'``."""

from adafuse_integrations._shared import require

require("llama_index.core", "llama-index-core", extra="llama-index")

from adafuse_integrations.llama_index.llm import AdaFuseLLM  # noqa: E402 - after the check above

__all__ = ["AdaFuseLLM"]
