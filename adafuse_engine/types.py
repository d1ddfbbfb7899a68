"""The values that cross module borders: plain, frozen, free of torch and of token ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from adafuse_engine.trace import Round, Trace

__all__ = [
    "Branch",
    "Candidate",
    "Chat",
    "Chunk",
    "Completion",
    "FinishReason",
    "InvalidToolCall",
    "MemberUsage",
    "Message",
    "Prompt",
    "Prompts",
    "Score",
    "Tool",
    "ToolCall",
    "Usage",
]

FinishReason: TypeAlias = Literal["stop", "length"]
"""``stop``: the members ended the text, or a stop string came. ``length``: ``max_tokens``, a context window, or
the budget ``max_forward_passes``."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the answer may call. ``parameters``: the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as the answer holds it. ``arguments``: the parsed JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """What looked like a call of a tool and was none. ``arguments``: the text as it was written."""

    id: str
    name: str | None
    arguments: str
    error: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message.

    ``role``: ``system``, ``user``, ``assistant`` or ``tool``. ``tool_calls``: what an assistant called.
    ``tool_call_id``: the call whose result a tool message holds. ``name``: of the tool, or of who speaks.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """Chat messages with the tools that the answer may call, and the form (by name) that it calls them in."""

    messages: Sequence[Message | Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_form: str = "json_tags"


Prompt: TypeAlias = str | Sequence[Message | Mapping[str, Any]] | Chat
"""Raw text, passed to every member as it is; or chat messages, for each member's own chat template."""

Prompts: TypeAlias = Prompt | Mapping[str, Prompt]
"""One prompt for all members, or one per member by name (a *view* of the question per member)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A span that may be committed: whole words, and whether the text ends after them.

    ``closed[i]`` is false where word i was cut by the token cap rather than ended by its proposer.
    """

    words: tuple[bytes, ...]
    end: bool = False
    closed: tuple[bool, ...] = ()

    @property
    def data(self) -> bytes:
        """The candidate's bytes, without the end of the text."""
        return b"".join(self.words)

    @property
    def key(self) -> tuple[bytes, bool]:
        """What makes two candidates the same one: their bytes and the end flag."""
        return (self.data, self.end)


@dataclass(frozen=True, slots=True)
class Branch:
    """A candidate of which only the beginning is known: ``words``, and the first token of the next one.

    ``logprob``: its proposer's log-probability up to there, in nats; no completion of it has a higher one.
    """

    words: tuple[bytes, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class Score:
    """What one member thinks of one candidate, in nats.

    ``logprobs[i]``: log-probability of words 0..i from the ledger on, tokens summed. ``boundary[i]``: log mass
    of the tokens that would end word i there (0 where the word ends by itself). ``end_logprob``: of the end
    of the text after the last word, None if the candidate has no end. ``tokens``: tokens of the candidate
    under this member, its end counted as one.
    """

    logprobs: tuple[float, ...]
    boundary: tuple[float, ...]
    tokens: int
    end_logprob: float | None = None

    @classmethod
    def abstention(cls, candidate: Candidate) -> Score:
        """The score of a member that has no say."""
        nan = (math.nan,) * len(candidate.words)
        return cls(nan, nan, 1, math.nan if candidate.end or not candidate.words else None)

    @property
    def total(self) -> float:
        """Log-probability of the whole candidate, its end included if it has one."""
        words = self.logprobs[-1] if self.logprobs else 0.0
        return words + (self.end_logprob or 0.0)


@dataclass(frozen=True, slots=True)
class MemberUsage:
    """What one request cost one member.

    ``seconds``: time of the forwards it took part in. ``prompt_tokens_reused``: tokens at the beginning of the
    prompt that an earlier request had computed, and that are no part of ``tokens_processed``. ``drafted``:
    tokens of other members' candidates that it had seen when it proposed; ``accepted``: those of them that it
    then proposed itself. ``branches_skipped``: branches left unwritten because they could not win any more.
    """

    name: str
    prompt_tokens: int
    tokens_processed: int
    forward_passes: int
    seconds: float
    prompt_tokens_reused: int = 0
    drafted: int = 0
    accepted: int = 0
    branches_skipped: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out, counted by the first member's tokenizer, and the cost per member."""

    prompt_tokens: int
    completion_tokens: int
    members: tuple[MemberUsage, ...] = ()

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "members": [asdict(m) for m in self.members],
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt, with what it cost and how it came about."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    trace: Trace = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the trace included."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage.to_dict(),
            "trace": self.trace.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream: the text that a round made certain to be part of the answer.

    ``confidence`` is the greatest confidence among the members that proposed the round's winner, ``fused``
    whether members' scores decided it, ``round`` its number in the trace. Joined, the texts of a stream equal
    ``Completion.text``. The last chunk (its text may be empty) carries the ``completion``. ``record``: the whole
    round, as the trace has it; None where a text ends without one.
    """

    text: str
    round: int
    confidence: float
    fused: bool
    completion: Completion | None = None
    record: Round | None = field(default=None, repr=False, compare=False)
