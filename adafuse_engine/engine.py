"""The engine: members, a loop thread they run on, and one way in for every caller."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeVar, overload

from adafuse_engine.config import DecodingConfig, EngineConfig, MemberConfig, check_ensemble
from adafuse_engine.configfile import read_config
from adafuse_engine.decoding import Emit, decode, ignore
from adafuse_engine.errors import (
    ContextWindowError,
    EmptyPromptError,
    EngineClosedError,
    InvalidArgumentError,
    MemberError,
    UnknownArgumentError,
    check_text,
)
from adafuse_engine.guarded import GuardedSession
from adafuse_engine.loop import LoopThread, together
from adafuse_engine.members.base import Connected, Member, OutOfRoom, Session
from adafuse_engine.members.guide import byte_guides
from adafuse_engine.members.pool import load_members
from adafuse_engine.scoring import TextScore, score_text, words_of
from adafuse_engine.service import Governor
from adafuse_engine.trace import Failure, Trace
from adafuse_engine.types import Chat, Chunk, Completion, Prompt, Prompts, Usage
from adafuse_engine.voices import Voice

__all__ = ["Engine"]

T = TypeVar("T")


class Engine:
    """An ensemble of language models that answers as one.

    Parameters
    ----------
    config
        Members to load and settings to decode with.
    members, weights, decoding, max_concurrency
        In place of ``config``: ready members (as `adafuse_engine.testing` makes them), their weights (equal
        by default) and settings. Ready members stay the caller's: several engines may use them, and closing
        an engine does not close them.

    All methods may be called from many threads and tasks at once. Close the engine when done, or use it as a
    context manager.

    Raises
    ------
    ConfigError, LoadError
        While it is made. Calls raise `PromptError`, `ConfigError`, `MemberError` and `EngineClosedError`.
    """

    _shared: ClassVar[dict[tuple[str, ...], Engine]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        members: Sequence[Member] | None = None,
        weights: Sequence[float] | None = None,
        decoding: DecodingConfig | None = None,
        max_concurrency: int = 8,
    ) -> None:
        if (config is None) == (members is None):
            raise InvalidArgumentError("give the engine either a config or ready members")
        self.config = config
        if config is not None:
            members = load_members(config)
            weights = [m.weight for m in config.members]
            decoding = decoding or config.decoding
            max_concurrency = config.max_concurrency
        self._members = tuple(members or ())
        raw = [float(w) for w in weights or [1.0] * len(self._members)]
        check_ensemble([m.name for m in self._members], raw)
        if len(raw) != len(self._members):
            raise InvalidArgumentError(f"{len(raw)} weights for {len(self._members)} members")
        self.decoding = decoding or DecodingConfig()
        self.weights = tuple(w / sum(raw) for w in raw)
        self.member_names = tuple(m.name for m in self._members)
        self.max_concurrency = max_concurrency
        self._closed = False
        self._loop = LoopThread("adafuse-engine")
        self._slots = asyncio.Semaphore(max_concurrency)
        self._finalizer = weakref.finalize(self, _shut, self._loop, self._members, config is not None)

    @classmethod
    def from_models(cls, models: Sequence[str | MemberConfig], **options: Any) -> Engine:
        """Load an ensemble by model names: hub ids, folders, ``.gguf`` paths or ``bundled:NAME``.

        ``options``: any field of `DecodingConfig` or `EngineConfig`.
        """
        ours = {k: options.pop(k) for k in list(options) if k in EngineConfig.model_fields}
        for name in options:
            if name not in DecodingConfig.model_fields:
                raise UnknownArgumentError(name, {*DecodingConfig.model_fields, *EngineConfig.model_fields})
        decoding = ours.pop("decoding", DecodingConfig()).override(**options)
        return cls(EngineConfig(**{**ours, "members": list(models), "decoding": decoding}))

    @classmethod
    def from_config(cls, path: str | Path) -> Engine:
        """Load the ensemble that a configuration file names (see `adafuse_engine.configfile`)."""
        return cls(read_config(path))

    @classmethod
    def shared(cls, config: EngineConfig) -> Engine:
        """The one engine of this process for these members; made if there is none, closed at exit.

        Settings to decode with are no part of what makes engines equal: give them per call.
        """
        key = config.identity()
        with cls._shared_lock:
            engine = cls._shared.get(key)
            if engine is None or engine.closed:
                engine = cls._shared[key] = cls(config)
            return engine

    # ---- facts

    def __repr__(self) -> str:
        return f"Engine(members={list(self.member_names)}, closed={self._closed})"

    @property
    def model_name(self) -> str:
        """The members' names, joined by ``+``."""
        return "+".join(self.member_names)

    @property
    def context_window(self) -> int:
        """The smallest context window among the members, in tokens."""
        return min(m.context_window for m in self._members)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text by the first member's tokenizer, no special tokens added; for counting."""
        return self._members[0].tokenize(text)

    def count_tokens(self, text: str) -> int:
        """Tokens of the text by the first member's tokenizer, no special tokens added."""
        return len(self.tokenize(text))

    def check_options(self, **options: Any) -> DecodingConfig:
        """The settings a call with these options would use; raises what that call would raise."""
        return self.decoding.override(**options)

    def only(self, name: str) -> Engine:
        """An engine of one of these members, with the same settings; the member stays this engine's."""
        for member in self._members:
            if member.name == name:
                return Engine(members=[member], decoding=self.decoding, max_concurrency=self.max_concurrency)
        raise UnknownArgumentError(name, self.member_names, "member")

    # ---- answers

    def generate(self, prompt: Prompts, **options: Any) -> Completion:
        """Answer one prompt.

        Parameters
        ----------
        prompt
            Text, passed as it is; a list of chat messages, for each member's own template; or a dict that
            gives each member its own prompt by name.
        **options
            Any field of `DecodingConfig`, for this call only.
        """
        settings = self.check_options(**options)
        return self._result(self._submit(self._run(prompt, settings)))

    async def agenerate(self, prompt: Prompts, **options: Any) -> Completion:
        """`generate` for async callers. Cancelling the task stops the engine within one forward."""
        settings = self.check_options(**options)
        return await asyncio.wrap_future(self._submit(self._run(prompt, settings)))

    def stream(self, prompt: Prompts, **options: Any) -> Generator[Chunk, None, None]:
        """Answer one prompt piece by piece. Closing the iterator stops the engine within one forward."""
        settings = self.check_options(**options)
        inbox: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        future = self._submit(self._run(prompt, settings, inbox.put))
        # Done in every case, also when the engine is closed meanwhile: then it ends the queue.
        future.add_done_callback(lambda _: inbox.put(None))
        try:
            while (chunk := inbox.get()) is not None:
                yield chunk
            yield _last(self._result(future))
        finally:
            future.cancel()

    async def astream(self, prompt: Prompts, **options: Any) -> AsyncGenerator[Chunk, None]:
        """`stream` for async callers. Closing it or cancelling its task stops the engine."""
        settings = self.check_options(**options)
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Chunk | None] = asyncio.Queue()

        def put(chunk: Chunk | None) -> None:
            # The caller's loop may be closed before the engine notices that nobody listens.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(inbox.put_nowait, chunk)

        future = self._submit(self._run(prompt, settings, put))
        future.add_done_callback(lambda _: put(None))
        try:
            while (chunk := await inbox.get()) is not None:
                yield chunk
            yield _last(self._result(future))
        finally:
            future.cancel()

    @overload
    def generate_batch(
        self, prompts: Sequence[Prompts], *, return_exceptions: Literal[False] = False, **options: Any
    ) -> list[Completion]: ...
    @overload
    def generate_batch(
        self, prompts: Sequence[Prompts], *, return_exceptions: Literal[True], **options: Any
    ) -> list[Completion | BaseException]: ...
    def generate_batch(
        self, prompts: Sequence[Prompts], *, return_exceptions: bool = False, **options: Any
    ) -> list[Any]:
        """Answer several prompts, in order.

        With ``return_exceptions`` a prompt that fails gives its exception in its place; without, the first
        failure is raised and the prompts that are still running are cancelled.
        """
        settings = self.check_options(**options)
        futures = [self._submit(self._run(prompt, settings)) for prompt in prompts]
        results: list[Any] = []
        try:
            for future in futures:
                try:
                    results.append(self._result(future))
                except Exception as error:
                    if not return_exceptions:
                        raise
                    results.append(error)
        finally:
            for future in futures:
                future.cancel()
        return results

    def score(self, prompt: Prompts, text: str, *, end: bool = False, **options: Any) -> TextScore:
        """What the members think of ``text`` as the continuation of ``prompt``, and of its end after it if asked.

        Here a prompt may be an empty text: each member then starts as its model does. Raises
        `ContextWindowError` where prompt and text do not fit together.
        """
        return self.score_batch([(prompt, text)], end=end, **options)[0]

    def score_batch(
        self, pairs: Sequence[tuple[Prompts, str]], *, end: bool = False, **options: Any
    ) -> list[TextScore]:
        """`score` for several pairs of prompt and text, in order, side by side."""
        settings = self.check_options(**options)
        futures = [self._submit(self._score(prompt, text, end, settings)) for prompt, text in pairs]
        try:
            return [self._result(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    # ---- the loop thread

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()
            raise EngineClosedError
        try:
            return self._loop.submit(coroutine)
        except RuntimeError as error:
            raise EngineClosedError from error

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError as error:
            if self._closed:
                raise EngineClosedError from error
            raise
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def _run(
        self, prompt: Prompts, settings: DecodingConfig, put: Callable[[Chunk], None] | None = None
    ) -> Completion:
        governor = Governor.of(settings)
        prompts = self._prompts(prompt)
        seed = secrets.randbits(63) if settings.seed is None else settings.seed
        trace = Trace(self.member_names, self.weights, seed, settings.model_dump(mode="json"))
        emit = ignore if put is None else _chunker(put)
        guide = await byte_guides().start(settings.grammar) if settings.grammar else None
        async with self._opened(prompts, settings, trace) as sessions:
            voices = [
                Voice(m.name, w, s) for m, w, s in zip(self._members, self.weights, sessions, strict=True) if s
            ]
            written = await decode(voices, settings, trace, emit, governor, guide)
            usage = tuple(v.session.usage() for v in voices)
        return Completion(
            written.text,
            written.finish_reason,
            Usage(usage[0].prompt_tokens, written.tokens, usage),
            trace,
        )

    async def _score(self, prompt: Prompts, text: str, end: bool, settings: DecodingConfig) -> TextScore:
        words = words_of(text)
        # Before the members are opened: they tell only what their settings need.
        settings = settings.override(
            fusion="word_posterior", word_end_mass=True, grammar=None, on_member_failure="error"
        )
        prompts: list[Prompt] = [""] * len(self._members) if prompt == "" else self._prompts(prompt)
        async with self._opened(prompts, settings) as opened:
            sessions = [s for s in opened if s]
            try:
                told = await score_text(sessions, words, end, settings)
            except OutOfRoom as error:
                least = min(self._members, key=lambda m: m.context_window)
                needed = len(least.tokenize(text)) + sessions[self._members.index(least)].usage().prompt_tokens
                raise ContextWindowError(least.name, needed, least.context_window) from error
        shown = tuple(word.decode() for word in words)
        members = {name: tuple(row) for name, row in zip(self.member_names, told, strict=True)}
        return TextScore(shown, end, members, self.weights)

    @contextlib.asynccontextmanager
    async def _opened(
        self, prompts: Sequence[Prompt], settings: DecodingConfig, trace: Trace | None = None
    ) -> AsyncGenerator[list[Session | None]]:
        """A session of each member, once there is a place for the request; closed in every case.

        None for members that fail at once and that the others go on without.
        """
        going_on = trace is not None and settings.on_member_failure == "continue"
        async with self._slots:
            sessions: list[Session] = []

            async def enter(member: Member, text: Prompt) -> Session | MemberError:
                try:
                    session = await member.open(text, settings)
                except MemberError as error:
                    if not going_on:
                        raise
                    return error
                session = GuardedSession(session) if going_on else session
                sessions.append(session)
                return session

            try:
                entered = await together(enter(m, p) for m, p in zip(self._members, prompts, strict=True))
                failed = {
                    m.name: e for m, e in zip(self._members, entered, strict=True) if isinstance(e, MemberError)
                }
                if trace is not None:
                    trace.failures += [Failure(0, name, str(error)) for name, error in failed.items()]
                if not any(w for m, w in zip(self._members, self.weights, strict=True) if m.name not in failed):
                    raise next(iter(failed.values()))
                yield [None if isinstance(e, MemberError) else e for e in entered]
            finally:
                for session in sessions:
                    await session.close()

    def _prompts(self, prompt: Prompts) -> list[Prompt]:
        """One prompt per member, none of them empty."""
        if not isinstance(prompt, Mapping):
            prompts = [prompt] * len(self._members)
        else:
            for name in prompt:
                if name not in self.member_names:
                    raise UnknownArgumentError(str(name), self.member_names, "member in prompt")
            if missing := [name for name in self.member_names if name not in prompt]:
                raise InvalidArgumentError(f"prompt: no prompt for {', '.join(map(repr, missing))}")
            prompts = [prompt[name] for name in self.member_names]
        for one in prompts:
            messages = one.messages if isinstance(one, Chat) else one
            if isinstance(one, str):
                if not one.strip():
                    raise EmptyPromptError("the prompt has no text; give the members something to continue")
                check_text(one, "the prompt")
            elif not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
                raise InvalidArgumentError(
                    "prompt: a string, a list of messages, a Chat or a dict of those by member, not "
                    f"{'a Chat of ' if isinstance(one, Chat) else ''}{type(messages).__name__}"
                )
            elif not messages:
                raise EmptyPromptError("the list of messages is empty; give at least one user message")
        return prompts

    # ---- the end

    def close(self) -> None:
        """Cancel what is running, free the members it loaded, stop the loop thread. May be called again."""
        self._closed = True
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def _shut(loop: LoopThread, members: Sequence[Member], owned: bool) -> None:
    loop.close(m.disconnect for m in members if isinstance(m, Connected))
    if not owned:
        return
    for member in members:
        member.close()


def _chunker(put: Callable[[Chunk], None]) -> Emit:
    return lambda text, r: put(Chunk(text, r.index, r.certainty, r.fused, record=r))


def _last(completion: Completion) -> Chunk:
    rounds = completion.trace.rounds
    last = rounds[-1] if rounds else None
    return Chunk(
        "",
        last.index if last else 0,
        last.certainty if last else 0.0,
        last.fused if last else False,
        completion,
        last,
    )
