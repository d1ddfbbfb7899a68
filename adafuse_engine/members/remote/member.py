"""Remote members: who is there, whether it can score, and its side of a request."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from adafuse_engine.confidence import Distribution
from adafuse_engine.config import DecodingConfig, MemberConfig
from adafuse_engine.errors import AdaFuseError, InvalidArgumentError, LoadError, MemberError, UnavailableError
from adafuse_engine.loop import LoopThread
from adafuse_engine.members.guide import Guide
from adafuse_engine.members.local.tokenizing import Tokenizing, load_tokenizing
from adafuse_engine.members.remote.connection import Connection, HttpConnection, address_of
from adafuse_engine.members.remote.dialect import Dialect, Facts, Look
from adafuse_engine.members.remote.llamacpp import LlamaCppDialect
from adafuse_engine.members.remote.sequence import Pace, RemoteSequence
from adafuse_engine.members.remote.sglang import SglangDialect
from adafuse_engine.members.remote.vllm import VllmDialect
from adafuse_engine.members.session import Alphabet, TokenSequence, TokenSession
from adafuse_engine.scaling import tokens_needed
from adafuse_engine.types import Candidate, Prompt, Score

__all__ = ["DIALECTS", "RemoteMember", "connect", "load_remote"]

log = logging.getLogger("adafuse_engine")

DIALECTS: dict[str, Callable[[str, Connection, str | None], Dialect]] = {
    "vllm": VllmDialect,
    "llamacpp": LlamaCppDialect,
    "sglang": SglangDialect,
}
"""By name, in the order that ``auto`` tries them."""

SAMPLE = "The capital of France is"
SPELLED = "Tokenizers differ: naïve 你好 🎉\n\tx  =  10;"


class RemoteMember:
    """A member that a server holds. ``scores``: whether it may score, or only propose."""

    def __init__(
        self,
        config: MemberConfig,
        connection: Connection,
        dialect: Dialect,
        facts: Facts,
        tokenizing: Tokenizing,
    ) -> None:
        self.name = config.label
        self.facts = facts
        self.scores = not config.remote.propose_only
        windows = [w for w in (config.context_window, facts.context_window) if w]
        self.context_window = min(windows) if windows else tokenizing.context_window or 2048
        self._connection = connection
        self._dialect = dialect
        self._tokenizing = tokenizing
        self._top = min(config.remote.top_logprobs or dialect.most_top, tokenizing.vocabulary.size)
        self._ahead = config.remote.read_ahead
        self._pace = Pace()
        self._group = (config.model, facts.model)

    @property
    def dialect(self) -> str:
        """The name of its server's dialect."""
        return self._dialect.name

    @property
    def alphabet(self) -> Alphabet:
        """Its tokens as bytes."""
        return self._tokenizing.vocabulary

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, no special tokens added."""
        return self._tokenizing.tokenize(text)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The prompt as this member sees it.

        Raises `EmptyPromptError`, `ContextWindowError`.
        """
        return self._tokenizing.prompt_ids(prompt, self.context_window)

    def prepare_grammars(self) -> None:
        """Make what grammars need."""
        self._tokenizing.vocabulary.guides.prepare()

    async def open(self, prompt: Prompt, settings: DecodingConfig) -> TokenSession:
        """Start a request: the server reads the prompt with the first question."""
        ids = self.prompt_ids(prompt)
        vocabulary = self._tokenizing.vocabulary
        guide = await vocabulary.guides.start(settings.grammar) if settings.grammar else None
        sequence, root = await self.begin(ids, settings, guide)
        return (TokenSession if self.scores else _Proposing)(
            self.name,
            vocabulary,
            sequence,
            root,
            group=self._group,
            signature=tuple(ids),
            prompt_tokens=len(ids),
            context_window=self.context_window,
            guide=guide,
        )

    async def begin(
        self, ids: Sequence[int], settings: DecodingConfig, guide: Guide | None = None
    ) -> tuple[TokenSequence, Distribution]:
        """The sequence after token ids, and what is expected next."""
        vocabulary = self._tokenizing.vocabulary
        top = max(self._top, min(tokens_needed(settings, len(vocabulary.ends)), self._dialect.most_top))
        sequence = RemoteSequence(self._dialect, vocabulary, ids, top, self._ahead, self._pace)
        return sequence, await sequence.prefill(guide)

    async def disconnect(self) -> None:
        """Close the connections of this event loop."""
        await self._connection.aclose()

    def close(self) -> None:
        """Nothing but connections is held, and those belong to their loops."""

    async def check(self) -> None:
        """Refuse a server that has another tokenizer, or that cannot tell the probability of a given token.

        Three tokens are written and then scored. Raises `LoadError`.
        """
        mine = self._tokenizing.vocabulary.encode(SPELLED.encode())
        theirs = await self._dialect.tokenize(SPELLED)
        if theirs is not None and mine != theirs and self.tokenize(SPELLED) != theirs:
            raise LoadError(
                f"member {self.name!r}: its server spells texts in other tokens than its tokenizer here; name the "
                "server's own with MemberConfig(tokenizer=...)"
            )
        ids = tuple(self.prompt_ids(SAMPLE))
        [sight] = await self._dialect.look([Look(ids, ahead=3)], max(2, min(self._top, 5)))
        if not sight.tops:
            raise LoadError(f"member {self.name!r}: its server tells no log-probabilities")
        for i, token in enumerate(sight.tokens[: len(sight.tops)]):
            await self._agree(ids + tuple(sight.tokens[:i]), token, sight.tops[i])

    async def _agree(self, ids: tuple[int, ...], token: int, top: dict[int, float]) -> None:
        said = top.get(token)
        if said is None:
            raise LoadError(f"member {self.name!r}: its server does not tell the probability of what it writes")
        if not self.scores:
            return
        [again] = await self._dialect.look([Look(ids, (token,), ahead=0)], 2)
        scored = again.asked.get(token, math.nan)
        if not abs(scored - said) <= self._dialect.tolerance:
            raise LoadError(
                f"member {self.name!r}: its server wrote a token with log-probability {said:.3f} and scores it "
                f"{scored:.3f}; it cannot score. Let it propose only: remote.propose_only = true"
            )


class _Proposing(TokenSession):
    """A session that abstains from every vote."""

    async def score(self, candidates: Sequence[Candidate], settings: DecodingConfig) -> list[Score]:
        """NaN for all: no say."""
        return [Score.abstention(c) for c in candidates]


async def connect(
    config: MemberConfig, connection: Connection, kind: type[RemoteMember] = RemoteMember
) -> RemoteMember:
    """Reach a member's server, find out its dialect and model, load the tokenizer, test it.

    Raises `LoadError` or `MemberError`.
    """
    _, model = address_of(config.model) if config.is_remote else ("", None)
    names = DIALECTS if config.dialect == "auto" else [config.dialect]
    refused: list[str] = []
    for name in names:
        dialect = DIALECTS[name](config.label, connection, model)
        try:
            facts = await dialect.facts()
        except UnavailableError as error:
            if len(refused) + 1 == len(names) or "cannot be reached" in str(error) or "within" in str(error):
                raise
            refused.append(f"{name}: {error}")
            continue
        except MemberError as error:
            refused.append(f"{name}: {error}")
            continue
        source = config.tokenizer or facts.source
        if source is None:
            raise InvalidArgumentError(
                f"member {config.label!r}: its server does not say what it runs; set MemberConfig(tokenizer=...)"
            )
        member = kind(config, connection, dialect, facts, _tokenizing(config, source))
        await member.check()
        return member
    raise LoadError(f"member {config.label!r}: no known kind of server answers there ({'; '.join(refused)})")


def _tokenizing(config: MemberConfig, source: str) -> Tokenizing:
    try:
        return load_tokenizing(config, source)
    except LoadError as error:
        if config.tokenizer:
            raise
        raise LoadError(
            f"member {config.label!r}: its server runs {source!r}, and no tokenizer can be loaded from there "
            f"({error}); set MemberConfig(tokenizer=...) to a folder, .gguf file or hub id of the same model"
        ) from error


def load_remote(config: MemberConfig, *, grammars: bool = True) -> RemoteMember:
    """`connect` for callers that may wait. Failures are `LoadError`."""
    loop = LoopThread("adafuse-connect")

    async def reach() -> RemoteMember:
        connection = HttpConnection.to(config)
        try:
            return await connect(config, connection)
        finally:
            await connection.aclose()

    try:
        member = loop.submit(reach()).result()
    except MemberError as error:
        raise LoadError(str(error)) from error
    except AdaFuseError:
        raise
    finally:
        loop.close()
    if grammars:
        member.prepare_grammars()
    return member
