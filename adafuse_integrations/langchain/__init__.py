"""LangChain: an ensemble as an LLM and a chat model. Needs ``pip install 'adafuse-integrations[langchain]'``."""

from adafuse_integrations._shared import require

require("langchain_core", "langchain-core", extra="langchain")

from adafuse_integrations.langchain.chat import ChatAdaFuse  # noqa: E402 - after the check above
from adafuse_integrations.langchain.llm import AdaFuseLLM  # noqa: E402

__all__ = ["AdaFuseLLM", "ChatAdaFuse"]
