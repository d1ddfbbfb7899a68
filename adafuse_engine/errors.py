"""The exception tree: one root, one class per kind of fault, each message says what to do.

::

    AdaFuseError
    ├── ConfigError (ValueError)
    │   ├── UnknownArgumentError (TypeError)   a name that no setting has
    │   └── InvalidArgumentError               a value that a setting cannot take
    ├── PromptError (ValueError)
    │   ├── EmptyPromptError
    │   ├── PromptTextError                    half a character
    │   └── ContextWindowError                 the prompt does not fit the smallest member
    ├── LoadError
    │   ├── ModelNotFoundError
    │   ├── ModelFormatError                   unreadable, corrupt or unsafe weights
    │   ├── TokenizerError                     token ids do not give back the bytes
    │   ├── FetchError                         a packaged model could not be fetched
    │   └── InsufficientMemoryError            the weights are larger than what is free
    ├── MemberError                            a member failed while decoding
    │   ├── NonFiniteLogitsError               NaN where a distribution should be
    │   ├── UnavailableError               a server or actor that holds a member does not answer
    │   ├── OutOfMemoryError                   this request needs more memory than there is
    │   └── NoScoreError                       every member abstained
    ├── EngineClosedError (RuntimeError)
    └── MissingExtraError (ImportError)        an optional dependency is not installed

Exceptions of other libraries are mapped to these once, at the member or loader that called them, and
stay reachable as ``__cause__``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "AdaFuseError",
    "ConfigError",
    "ContextWindowError",
    "EmptyPromptError",
    "EngineClosedError",
    "FetchError",
    "InsufficientMemoryError",
    "InvalidArgumentError",
    "LoadError",
    "MemberError",
    "MissingExtraError",
    "ModelFormatError",
    "ModelNotFoundError",
    "NoScoreError",
    "NonFiniteLogitsError",
    "OutOfMemoryError",
    "PromptError",
    "PromptTextError",
    "TokenizerError",
    "UnavailableError",
    "UnknownArgumentError",
]


class AdaFuseError(Exception):
    """Root of every error this project raises on purpose. They can be sent to other processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Not by calling the class again, whose arguments are not the message."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[AdaFuseError], args: tuple[Any, ...], state: dict[str, Any]) -> AdaFuseError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(AdaFuseError, ValueError):
    """A configuration or call argument is wrong."""


class UnknownArgumentError(ConfigError, TypeError):
    """An argument that no setting has; the message gives the nearest known name."""

    def __init__(self, name: str, known: Iterable[str], where: str = "argument") -> None:
        self.name = name
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        super().__init__(f"unknown {where} {name!r}; {hint}")


class InvalidArgumentError(ConfigError):
    """A known argument with a value it cannot take."""


class PromptError(AdaFuseError, ValueError):
    """A prompt that cannot be answered as given."""


class PromptTextError(PromptError):
    """The prompt is no Unicode text: it holds half of a character that takes two UTF-16 units."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} holds half a character (a lone surrogate), which UTF-8 cannot spell; drop it")


class EmptyPromptError(PromptError):
    """The prompt has no text."""


class ContextWindowError(PromptError):
    """The prompt is longer than the context window of some member (both in that member's tokens)."""

    def __init__(self, member: str, prompt_tokens: int, context_window: int) -> None:
        self.member = member
        self.prompt_tokens = prompt_tokens
        self.context_window = context_window
        super().__init__(
            f"the prompt is {prompt_tokens} tokens for member {member!r}, whose context window is "
            f"{context_window}; shorten it by at least {prompt_tokens - context_window + 1} tokens "
            "or leave that member out"
        )


def check_text(text: str, where: str) -> str:
    """The text itself. Raises `PromptTextError` where it cannot be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptTextError(where) from error
    return text


class LoadError(AdaFuseError):
    """A member could not be loaded."""


class ModelNotFoundError(LoadError):
    """The model's name leads to nothing that can be loaded."""


class ModelFormatError(LoadError):
    """The model's files are unreadable, corrupt, or of a kind that is refused (pickles)."""


class TokenizerError(LoadError):
    """The tokenizer's ids do not decode to the bytes they came from."""


class FetchError(LoadError):
    """A packaged model could not be fetched or did not match its checksum."""


class InsufficientMemoryError(LoadError):
    """The weights of the members do not fit into what is free on their device; nothing was loaded."""

    def __init__(self, device: str, needed: Mapping[str, int], free: int) -> None:
        self.device = device
        self.needed = dict(needed)
        self.free = free
        each = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in needed.items())
        total = sum(needed.values()) / 1e9
        super().__init__(
            f"the weights do not fit on {device}: {each}, together {total:.2f} GB, and {free / 1e9:.2f} GB is "
            "free; use dtype='bfloat16' or a quantization, fewer members, or another device for some "
            "(a member with a device_map is loaded without this check)"
        )


class MemberError(AdaFuseError):
    """A member failed while a request was running."""


class NonFiniteLogitsError(MemberError):
    """A member returned NaN where its next-token distribution should be."""

    def __init__(self, member: str) -> None:
        self.member = member
        super().__init__(
            f"member {member!r} returned NaN logits; load it with dtype='float32' or 'bfloat16' "
            "(float16 overflows in many models), or check its weights"
        )


class OutOfMemoryError(MemberError):
    """A request needs more memory than a member has for it. Other requests go on."""

    def __init__(self, member: str, why: str) -> None:
        self.member = member
        super().__init__(
            f"member {member!r} has too little memory for this request: {why}; shorten the prompt, lower "
            "max_tokens or max_concurrency, or load the model with dtype='bfloat16'"
        )


class UnavailableError(MemberError):
    """What holds a member (a server, an actor) does not answer, or not with what was asked for."""

    def __init__(self, member: str, why: str) -> None:
        self.member = member
        super().__init__(
            f"member {member!r} is unavailable: {why}; check that it runs, or let the others go on without it "
            "with on_member_failure='continue'"
        )


class NoScoreError(MemberError):
    """No member gave a usable score to the candidates of a round."""


class EngineClosedError(AdaFuseError, RuntimeError):
    """The engine was closed; make a new one."""

    def __init__(self) -> None:
        super().__init__("the engine is closed; make a new Engine")


class MissingExtraError(AdaFuseError, ImportError):
    """An optional dependency is missing; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{package} is not installed; run: pip install 'adafuse-integrations[{extra}]'")
