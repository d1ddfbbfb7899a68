"""AdaFuse: several language models answer as one, word by word, gated by their own uncertainty.

The shared engine. Nothing here imports torch before a local model is loaded.
"""

from adafuse_engine.config import DecodingConfig, EngineConfig, MemberConfig, RemoteConfig
from adafuse_engine.configfile import read_config, write_config
from adafuse_engine.engine import Engine
from adafuse_engine.errors import (
    AdaFuseError,
    ConfigError,
    ContextWindowError,
    EmptyPromptError,
    EngineClosedError,
    FetchError,
    InsufficientMemoryError,
    InvalidArgumentError,
    LoadError,
    MemberError,
    MissingExtraError,
    ModelFormatError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    NoScoreError,
    OutOfMemoryError,
    PromptError,
    TokenizerError,
    UnavailableError,
    UnknownArgumentError,
)
from adafuse_engine.scoring import TextScore
from adafuse_engine.trace import CandidateTrace, Round, Trace
from adafuse_engine.types import (
    Chat,
    Chunk,
    Completion,
    InvalidToolCall,
    MemberUsage,
    Message,
    Tool,
    ToolCall,
    Usage,
)

__all__ = [
    "AdaFuseError",
    "CandidateTrace",
    "Chat",
    "Chunk",
    "Completion",
    "ConfigError",
    "ContextWindowError",
    "DecodingConfig",
    "EmptyPromptError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "FetchError",
    "InsufficientMemoryError",
    "InvalidArgumentError",
    "InvalidToolCall",
    "LoadError",
    "MemberConfig",
    "MemberError",
    "MemberUsage",
    "Message",
    "MissingExtraError",
    "ModelFormatError",
    "ModelNotFoundError",
    "NoScoreError",
    "NonFiniteLogitsError",
    "OutOfMemoryError",
    "PromptError",
    "RemoteConfig",
    "Round",
    "TextScore",
    "TokenizerError",
    "Tool",
    "ToolCall",
    "Trace",
    "UnavailableError",
    "UnknownArgumentError",
    "Usage",
    "read_config",
    "write_config",
]
