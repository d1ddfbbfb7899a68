"""Members on local weights: a transformers model, its tokenizer, its worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from transformers import PreTrainedTokenizerBase

from adafuse_engine.confidence import Distribution
from adafuse_engine.config import DecodingConfig, EngineConfig, MemberConfig
from adafuse_engine.errors import (
    AdaFuseError,
    LoadError,
    MemberError,
    OutOfMemoryError,
)
from adafuse_engine.members.base import Member
from adafuse_engine.members.guide import Guide
from adafuse_engine.members.local.admission import Admission, spare_columns
from adafuse_engine.members.local.loading import LoadedModel, load
from adafuse_engine.members.local.memory import check_memory, is_out_of_memory
from adafuse_engine.members.local.plain import PlainRunner
from adafuse_engine.members.local.runner import Feed, Runner, Tree, Want
from adafuse_engine.members.local.selfcheck import tree_attention_works
from adafuse_engine.members.local.tokenizing import Tokenizing
from adafuse_engine.members.local.tokens import Vocabulary, end_tokens
from adafuse_engine.members.local.worker import Worker
from adafuse_engine.members.session import Alphabet, Fed, TokenSequence, TokenSession
from adafuse_engine.progress import track
from adafuse_engine.scaling import tokens_needed
from adafuse_engine.types import Prompt

__all__ = ["LocalMember", "LocalModel", "load_local"]

log = logging.getLogger("adafuse_engine")

LONG_PREFILL = 2048
"""Prompts of more tokens than this show their progress."""


class LocalModel:
    """One copy of a model's weights, with what all members on it share. Closed with its last member."""

    def __init__(
        self,
        config: MemberConfig,
        loaded: LoadedModel,
        prefix_slots: int = 4,
        kv_max_bytes: int | None = None,
    ) -> None:
        self.tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
        model = loaded.model
        ends = end_tokens(model, loaded.tokenizer)
        size = model.get_input_embeddings().weight.shape[0]
        head = model.get_output_embeddings()
        if head is not None:
            size = head.weight.shape[0]
        self.vocabulary = Vocabulary(config.label, loaded.tokenizer, ends, size)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.context_window: int = limit or 2048
        self.runner = Runner(model, self.vocabulary, prefix_slots)
        if not tree_attention_works(self.runner):
            log.warning(
                "%s cannot attend to a tree of candidates; every token is computed from the whole text instead, "
                "which is exact and slow",
                config.label,
            )
            self.runner = PlainRunner(model, self.vocabulary)
        if config.compile:
            model.forward = torch.compile(model.forward, dynamic=True)
        self.worker = _acquire_worker(str(self.runner.device))
        self.members = 0
        self.admission = Admission(self.runner, kv_max_bytes)
        self._lock = threading.Lock()

    def join(self) -> None:
        """Count one more member on these weights."""
        with self._lock:
            self.members += 1

    def leave(self) -> None:
        """Count one less; free the weights after the last."""
        with self._lock:
            self.members -= 1
            if self.members:
                return
        _release_worker(self.worker)
        del self.runner, self.admission
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class LocalMember:
    """A member on local weights, with its own name, template and window. Other members may share the weights."""

    def __init__(self, config: MemberConfig, model: LocalModel, *, progress: bool) -> None:
        self.name = config.label
        self.context_window = config.context_window or model.context_window
        self._template = config.chat_template
        self._model: LocalModel | None = model
        self._progress = progress
        model.join()

    @property
    def model(self) -> LocalModel:
        """The weights; raises `MemberError` after `close`."""
        if self._model is None:
            raise MemberError(f"member {self.name!r} is closed")
        return self._model

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, no special tokens added."""
        return self._tokenizing.tokenize(text)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The prompt as this member sees it.

        Raises `EmptyPromptError`, `ContextWindowError`.
        """
        return self._tokenizing.prompt_ids(prompt, self.context_window)

    @property
    def _tokenizing(self) -> Tokenizing:
        model = self.model
        return Tokenizing(self.name, model.tokenizer, model.vocabulary, model.context_window, self._template)

    @property
    def alphabet(self) -> Alphabet:
        """Its tokens as bytes."""
        return self.model.vocabulary

    async def open(self, prompt: Prompt, settings: DecodingConfig) -> TokenSession:
        """Start a request: render the prompt, prefill it chunk by chunk."""
        ids = self.prompt_ids(prompt)
        guides = self.model.vocabulary.guides
        guide = await guides.start(settings.grammar) if settings.grammar else None
        sequence, root = await self.begin(ids, settings, guide)
        return TokenSession(
            self.name,
            self.model.vocabulary,
            sequence,
            root,
            group=id(self.model),
            signature=tuple(ids),
            prompt_tokens=len(ids),
            context_window=self._window(len(ids), settings)[0],
            guide=guide,
        )

    async def begin(
        self, ids: Sequence[int], settings: DecodingConfig, guide: Guide | None = None
    ) -> tuple[TokenSequence, Distribution]:
        """Prefill token ids: the sequence after them, and what it expects next."""
        model = self.model
        want = Want(
            tokens_needed(settings, len(model.vocabulary.ends)),
            settings.confidence == "entropy",
            settings.counts_word_ends,
        )
        window, spare = self._window(len(ids), settings)
        columns = min(window, len(ids) + 2 * settings.max_tokens) + spare
        sequence = _Sequence(self.name, model, Tree(want))
        try:
            root = await sequence.prefill(ids, columns, guide, progress=self._progress)
        except BaseException:
            await sequence.release()
            raise
        return sequence, root

    def _window(self, prompt_tokens: int, settings: DecodingConfig) -> tuple[int, int]:
        """Tokens that prompt and text may take, and what a round needs beside them for its candidates."""
        most = self.model.admission.most_columns(self.model.members)
        spare = spare_columns(settings)
        if most is None:
            return self.context_window, spare
        if prompt_tokens + spare >= most:
            raise OutOfMemoryError(
                self.name,
                f"kv_max_bytes allows it {most} tokens, {spare} of them for candidates, and the prompt is "
                f"{prompt_tokens}; raise it",
            )
        return min(self.context_window, most - spare), spare

    def close(self) -> None:
        """Give up the weights. May be called again."""
        if self._model is not None:
            model, self._model = self._model, None
            model.leave()


class _Sequence:
    """`TokenSequence` on a runner's tree, by way of the worker. Foreign exceptions are mapped here."""

    def __init__(self, name: str, model: LocalModel, tree: Tree) -> None:
        self._name = name
        self._runner = model.runner
        self._worker = model.worker
        self._admission = model.admission
        self._tree = tree

    @property
    def forward_passes(self) -> int:
        return self._tree.forward_passes

    @property
    def tokens_processed(self) -> int:
        return self._tree.tokens_processed

    @property
    def seconds(self) -> float:
        return self._tree.seconds

    @property
    def pace(self) -> float:
        return self._runner.pace

    @property
    def reused(self) -> int:
        return self._tree.reused

    async def prefill(
        self, ids: Sequence[int], columns: int, guide: Guide | None, *, progress: bool
    ) -> Distribution:
        guides = [guide] if guide else []
        entered: Future[None] = Future()
        self._worker.post(lambda: self._admission.enter(self._tree, ids, columns, entered))
        with self._mapped():
            await asyncio.wrap_future(entered)
        with track(
            f"{self._name}: reading the prompt", len(ids), enabled=progress and len(ids) > LONG_PREFILL
        ) as advance:
            advance(self._tree.reused)
            for start in range(self._tree.reused, len(ids), self._runner.chunk):
                chunk = ids[start : start + self._runner.chunk]
                [root] = await self._feed(Feed(self._tree, (), chunk, prefill=True, guides=guides))
                advance(len(chunk))
        return root.distribution

    async def grow(
        self, parents: Sequence[int], tokens: Sequence[int], guides: Sequence[Guide | None] = ()
    ) -> list[Fed]:
        return await self._feed(Feed(self._tree, parents, tokens, guides=guides))

    async def _feed(self, feed: Feed) -> list[Fed]:
        with self._mapped():
            results: list[Fed] = await self._worker.feed(self._runner, feed)
        return results

    async def keep(self, path: Sequence[int]) -> None:
        with self._mapped():
            await self._worker.call(lambda: self._runner.keep(self._tree, path))

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except AdaFuseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                why, *_ = str(error).strip().splitlines() or [type(error).__name__]
                raise OutOfMemoryError(self._name, why[:200].rstrip(".")) from error
            raise MemberError(f"member {self._name!r} failed: {type(error).__name__}: {error}") from error

    async def release(self) -> None:
        # Not awaited: a request that is being cancelled must not wait for the forward that is running.
        self._worker.post(lambda: self._admission.leave(self._tree))


def load_local(config: EngineConfig) -> list[Member]:
    """Load all members of an ensemble, each distinct model once.

    Raises `LoadError`; what was loaded before the failure is freed. Weights that do not fit are not loaded at all.
    """
    check_memory(config)
    models: dict[tuple[str, ...], LocalModel] = {}
    members: list[Member] = []
    try:
        for member in config.members:
            key = member.weights_key()
            if key not in models:
                models[key] = _model(member, config)
            members.append(LocalMember(member, models[key], progress=config.progress))
    except BaseException:
        for made in members:
            made.close()
        raise
    return members


def _model(member: MemberConfig, config: EngineConfig) -> LocalModel:
    loaded = load(member, progress=config.progress)
    try:
        model = LocalModel(member, loaded, config.prefix_slots, config.kv_max_bytes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"{member.label}: its weights fit into memory, but nothing is left to run it in; load it with "
            "dtype='bfloat16', a quantization, or on another device"
        ) from error
    if config.prepare_grammars:
        model.vocabulary.guides.prepare()
    return model


_workers: dict[str, tuple[Worker, int]] = {}
_workers_lock = threading.Lock()


def _acquire_worker(device: str) -> Worker:
    """The device's one worker: models on a device take turns, in whatever engine they are."""
    with _workers_lock:
        worker, users = _workers.get(device) or (Worker(device), 0)
        _workers[device] = (worker, users + 1)
        return worker


def _release_worker(worker: Worker) -> None:
    with _workers_lock:
        for device, (known, users) in list(_workers.items()):
            if known is worker:
                if users > 1:
                    _workers[device] = (worker, users - 1)
                    return
                del _workers[device]
    worker.close()
