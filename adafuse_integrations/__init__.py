"""AdaFuse for LangChain and LlamaIndex.

`adafuse_integrations.langchain` and `adafuse_integrations.llama_index` each need the extra of their name, and
alone import their framework. The engine behind both is `adafuse_engine`.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("adafuse-integrations")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0.0.0"
