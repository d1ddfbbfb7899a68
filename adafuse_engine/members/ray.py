"""Members in Ray actors: the weights are loaded where the actor runs, and a request talks in whole steps.

A step (outline, score, commit, ...) is one message each way, however many tokens it takes. What the session here
keeps of a request (its prompt, its ledger, the steps since the last commit) is enough to begin it again in an actor
that Ray has restarted.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any, Final, get_args

from adafuse_engine.config import ConfidenceKind, DecodingConfig, EngineConfig, MemberConfig
from adafuse_engine.errors import AdaFuseError, LoadError, MissingExtraError, UnavailableError
from adafuse_engine.members.base import OutOfRoom, Session
from adafuse_engine.members.local.tokenizing import Tokenizing, load_tokenizing
from adafuse_engine.types import Branch, Candidate, MemberUsage, Prompt, Score

__all__ = ["RayMember", "load_ray"]

REBUILDS: Final = 3
"""Actors that one request may lose before it ends with an error."""

_starting = threading.Lock()

POLL_S: Final = 0.25
"""Between two tries to reach an actor that is being restarted."""


@dataclass(frozen=True, slots=True)
class _State:
    """What can be asked of a session without waiting, as it was after a step."""

    room: int
    pace: float
    usage: MemberUsage
    confidence: dict[ConfidenceKind, float]
    spelled: dict[tuple[bytes, ...], list[bytes]]


@dataclass(frozen=True, slots=True)
class _Reply:
    """A step's result, or what it raised. ``lost``: the actor knows no such session, for it is a new one."""

    value: Any = None
    error: Exception | None = None
    state: _State | None = None
    lost: bool = False


@dataclass(slots=True)
class _Held:
    """An open session of an actor, and its last outline, whose branches are known by their place in it."""

    session: Session
    outline: list[Any] = field(default_factory=list)


class Host:
    """What runs in the actor: one local member, and the sessions that are open on it."""

    def __init__(self, member: MemberConfig, config: EngineConfig) -> None:
        # Here and not above: this class is made where the weights are to be.
        from adafuse_engine.members.pool import load_members

        here = member.model_copy(update={"placement": "here"})
        [self._member] = load_members(config.model_copy(update={"members": (here,)}))
        self._sessions: dict[str, _Held] = {}

    async def facts(self) -> tuple[int, int]:
        """The context window, and the process that the actor is."""
        return self._member.context_window, os.getpid()

    async def open(self, key: str, prompt: Prompt, settings: DecodingConfig) -> _Reply:
        """Start a request under this key."""
        try:
            session = await self._member.open(prompt, settings)
        except (AdaFuseError, OutOfRoom) as error:
            return _Reply(error=error)
        self._sessions[key] = _Held(session)
        return _Reply(state=_state(session, ()))

    async def step(
        self, key: str, deferred: Sequence[bytes], skipped: int, name: str, args: Sequence[Any]
    ) -> _Reply:
        """One step of a session, after the words that were deferred and the branches that were skipped."""
        held = self._sessions.get(key)
        if held is None:
            return _Reply(lost=True)
        session = held.session
        session.defer(deferred)
        session.skip(skipped)
        try:
            if name == "complete":
                places, settings = args
                value = await session.complete([held.outline[i] for i in places], settings)
            else:
                value = await getattr(session, name)(*args)
        except (AdaFuseError, OutOfRoom) as error:
            return _Reply(error=error, state=_state(session, ()))
        if name == "outline":
            held.outline = value
        made = [value] if isinstance(value, Candidate) else value or ()
        asked = args[0] if name in ("consider", "score") else ()
        return _Reply(value, state=_state(session, [c for c in (*made, *asked) if isinstance(c, Candidate)]))

    async def close(self, key: str) -> None:
        """Free a session; nothing if there is none."""
        held = self._sessions.pop(key, None)
        if held is not None:
            await held.session.close()

    async def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)


def _state(session: Session, candidates: Sequence[Candidate]) -> _State:
    spans = {c.words[:n] for c in candidates for n in range(1, len(c.words) + 1)}
    return _State(
        session.room,
        session.pace,
        session.usage(),
        {kind: session.confidence(kind) for kind in get_args(ConfidenceKind)},
        {words: session.pieces(words) for words in spans},
    )


class RayMember:
    """A local member in an actor. A step may take ``timeout_s`` of its ``remote`` settings, a restart too."""

    def __init__(self, config: MemberConfig, actor: Any, window: int, tokenizing: Tokenizing) -> None:
        self.name = config.label
        self.context_window = window
        self._actor = actor
        self._tokenizing = tokenizing
        self._timeout = config.remote.timeout_s
        self._keys = count()

    @property
    def actor(self) -> Any:
        """The Ray actor handle."""
        return self._actor

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, no special tokens added."""
        return self._tokenizing.tokenize(text)

    async def open(self, prompt: Prompt, settings: DecodingConfig) -> RaySession:
        """Start a request in the actor."""
        session = RaySession(self, f"{id(self)}-{next(self._keys)}", prompt, settings)
        await session.begin()
        return session

    def can_write(self, data: bytes) -> bool:
        """Whether its tokenizer has tokens for these bytes."""
        return self._tokenizing.vocabulary.can_write(data)

    def encode(self, words: Sequence[bytes]) -> list[bytes]:
        """Words as its tokens, each as bytes."""
        vocabulary = self._tokenizing.vocabulary
        return [vocabulary.bytes_of(token) for word in words for token in vocabulary.encode(word)]

    async def ask(self, method: str, *args: Any) -> _Reply | None:
        """A message to the actor; None where it died over it or is being restarted.

        Raises `UnavailableError` where it does not answer in time or is gone for good.
        """
        import ray

        try:
            async with asyncio.timeout(self._timeout):
                reply: _Reply = await getattr(self._actor, method).remote(*args)
                return reply
        except TimeoutError as error:
            raise UnavailableError(self.name, f"its actor did not answer within {self._timeout:g} s") from error
        except ray.exceptions.ActorUnavailableError:
            return None
        except ray.exceptions.ActorDiedError as error:
            if "restart" in str(error).lower():
                return None
            raise UnavailableError(self.name, f"its actor died: {_first_line(error)}") from error
        except ray.exceptions.RayError as error:
            raise UnavailableError(self.name, f"its actor failed: {_first_line(error)}") from error

    @property
    def patience(self) -> float:
        """Seconds to wait for an actor that is being restarted."""
        return self._timeout

    def close(self) -> None:
        """End the actor. May be called more than once."""
        import ray

        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)
        self._actor = None


class RaySession:
    """A session whose work is done in an actor."""

    def __init__(self, member: RayMember, key: str, prompt: Prompt, settings: DecodingConfig) -> None:
        self._member = member
        self._key = key
        self._opening = prompt, settings
        self._life = 0
        self._state: _State
        self._ledger: list[bytes] = []
        self._deferred: list[bytes] = []
        self._skipped = 0
        self._outline: list[Candidate | Branch] = []
        self._since: list[tuple[str, tuple[Any, ...]]] = []
        self._closed = False

    # ---- what needs no message

    @property
    def signature(self) -> Hashable:
        """Every actor has weights of its own."""
        return ("ray", self._key)

    @property
    def group(self) -> Hashable:
        """As for the signature: it shares forwards with no other member."""
        return ("ray", id(self._member))

    @property
    def room(self) -> int:
        """Tokens that still fit the context window."""
        return self._state.room

    @property
    def pace(self) -> float:
        """Seconds that a forward takes in the actor."""
        return self._state.pace

    def confidence(self, kind: ConfidenceKind) -> float:
        """At the end of the ledger."""
        return self._state.confidence[kind]

    def can_write(self, data: bytes) -> bool:
        """Whether this member has tokens for these bytes."""
        return self._member.can_write(data)

    def skip(self, branches: int) -> None:
        """Count branches that are left unwritten; told with the next step."""
        self._skipped += branches

    def defer(self, words: Sequence[bytes]) -> None:
        """Append words; sent with the next step."""
        self._deferred.extend(words)

    def pieces(self, words: Sequence[bytes]) -> list[bytes]:
        """The words as this member's tokens, as the actor spelled them where it has."""
        known = None if self._deferred else self._state.spelled.get(tuple(words))
        return known if known is not None else self._member.encode(words)

    def usage(self) -> MemberUsage:
        """What the request cost so far."""
        usage = self._state.usage
        return replace(usage, branches_skipped=usage.branches_skipped + self._skipped)

    # ---- steps

    async def outline(self, settings: DecodingConfig, random: Random) -> list[Candidate | Branch]:
        """Certain words, then branches."""
        self._outline = await self._step("outline", settings, random)
        return self._outline

    async def complete(self, branches: Sequence[Branch], settings: DecodingConfig) -> list[Candidate]:
        """Write branches of the last outline to their end."""
        places = {id(branch): place for place, branch in enumerate(self._outline)}
        made: list[Candidate] = await self._step("complete", [places[id(b)] for b in branches], settings)
        return made

    async def consider(self, drafts: Sequence[Candidate]) -> None:
        """Look at other members' candidates."""
        await self._step("consider", list(drafts))

    async def lead(self, settings: DecodingConfig) -> Candidate:
        """The certain words alone."""
        led: Candidate = await self._step("lead", settings)
        return led

    async def score(self, candidates: Sequence[Candidate], settings: DecodingConfig) -> list[Score]:
        """What the member thinks of each."""
        scores: list[Score] = await self._step("score", list(candidates), settings)
        return scores

    async def commit(self, words: Sequence[bytes]) -> None:
        """Append words to the ledger."""
        deferred = list(self._deferred)
        await self._step("commit", list(words))
        self._ledger += [*deferred, *words]
        self._since = []

    async def sync(self) -> None:
        """Catch up with deferred words."""
        if self._deferred:
            await self.commit(())

    async def close(self) -> None:
        """Free what the actor holds. An actor that is gone holds nothing."""
        if not self._closed:
            self._closed = True
            try:
                await self._member.ask("close", self._name)
            except UnavailableError:
                return

    # ---- messages

    @property
    def _name(self) -> str:
        """The session's key in the actor of this life."""
        return f"{self._key}-{self._life}"

    async def begin(self) -> None:
        """Open the session, waiting for an actor that is being restarted."""
        deadline = time.monotonic() + self._member.patience
        while (reply := await self._member.ask("open", self._name, *self._opening)) is None:
            if time.monotonic() > deadline:
                raise UnavailableError(self._member.name, "its actor died and did not come back in time")
            await asyncio.sleep(POLL_S)
        self._taken(reply)

    async def _step(self, name: str, *args: Any) -> Any:
        message = (list(self._deferred), self._skipped, name, args)
        while True:
            reply = await self._member.ask("step", self._name, *message)
            if reply is not None and not reply.lost:
                break
            await self._rebuild()
        value = self._taken(reply)
        if self._deferred and name != "commit":
            # The actor caught up with them.
            self._ledger += self._deferred
        self._deferred, self._skipped = [], 0
        self._since.append((name, args))
        return value

    async def _rebuild(self) -> None:
        """Begin again in the restarted actor: the prompt, the ledger, the steps since the last commit."""
        while True:
            self._life += 1
            if self._life > REBUILDS:
                raise UnavailableError(self._member.name, f"its actor died {self._life} times during one request")
            await self.begin()
            steps = [("commit", (list(self._ledger),))] if self._ledger else []
            for name, args in [*steps, *self._since]:
                reply = await self._member.ask("step", self._name, [], 0, name, args)
                if reply is None or reply.lost:
                    break
                self._taken(reply)
            else:
                return

    def _taken(self, reply: _Reply) -> Any:
        if reply.state is not None:
            self._state = reply.state
        if reply.error is not None:
            raise reply.error
        return reply.value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def load_ray(member: MemberConfig, config: EngineConfig) -> RayMember:
    """Load a member in an actor of the running Ray cluster, or of one that is started on this machine.

    Raises `LoadError`, `MissingExtraError`.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    with _starting:
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
    tokenizing = load_tokenizing(member, member.tokenizer or member.model)
    kind = ray.remote(Host).options(
        num_cpus=member.num_cpus,
        num_gpus=member.num_gpus,
        max_restarts=-1,
        max_concurrency=1000,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(max(1, int(member.num_cpus)))}},
    )
    actor = kind.remote(member, config)
    try:
        window, _ = ray.get(actor.facts.remote())
    except ray.exceptions.RayError as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
        ray.kill(actor)
        raise LoadError(
            f"member {member.label!r}: its actor could not load it: {cause or _first_line(error)}"
        ) from error
    return RayMember(member, actor, window, tokenizing)
