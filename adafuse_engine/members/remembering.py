"""A member that remembers what its model said, so that trying another setting computes only what is new."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from adafuse_engine.confidence import Distribution
from adafuse_engine.config import DecodingConfig, MemberConfig
from adafuse_engine.members.base import Member
from adafuse_engine.members.guide import Guide
from adafuse_engine.members.session import Alphabet, Fed, TokenSequence, TokenSession, survivors
from adafuse_engine.scaling import tokens_needed
from adafuse_engine.types import Prompt

__all__ = ["Memory", "RememberingMember", "Steppable", "remembering"]

TOP = 24
"""Tokens of each distribution that are remembered, ends beside them."""


@runtime_checkable
class Steppable(Member, Protocol):
    """A member whose model can be stepped from token ids, as local members can."""

    @property
    def alphabet(self) -> Alphabet:
        """Its tokens as bytes."""
        ...

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The prompt as this member sees it."""
        ...

    async def begin(
        self, ids: Sequence[int], settings: DecodingConfig, guide: Guide | None = None
    ) -> tuple[TokenSequence, Distribution]:
        """Prefill token ids: the sequence after them, and what it expects next."""
        ...


class _Known:
    """A token in the trie under a prompt: its log-probability, what follows it, and the tokens tried there."""

    __slots__ = ("after", "fed", "number")

    def __init__(self, number: int, fed: Fed) -> None:
        self.number = number
        self.fed = fed
        self.after: dict[int, _Known] = {}


class Memory:
    """What models said after prompts: in memory, and in a folder if one is given, so that a later run knows it.

    The folder holds one file of JSON lines per model and prompt. A line that a killed process cut is left out.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._prompts: dict[tuple[Hashable, tuple[int, ...]], _Prompt] = {}

    def after(self, model: str, ids: Sequence[int]) -> _Prompt:
        """What is known after these token ids."""
        key = (model, tuple(ids))
        if key not in self._prompts:
            self._prompts[key] = _Prompt(self._file(model, ids))
        return self._prompts[key]

    def _file(self, model: str, ids: Sequence[int]) -> Path | None:
        if self._folder is None:
            return None
        name = hashlib.sha256(json.dumps([model, *ids]).encode()).hexdigest()[:32]
        return self._folder / f"{name}.jsonl"


class _Prompt:
    """The trie under one prompt."""

    def __init__(self, file: Path | None) -> None:
        self.root: _Known | None = None
        self._file = file
        self._nodes: list[_Known] = []
        if file is not None and file.exists():
            self._load(file)

    def add(self, parent: _Known | None, token: int, fed: Fed) -> _Known:
        """Remember a token under its parent; the prompt's end has none."""
        node = self._put(parent, token, fed)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_line(parent, token, fed)) + "\n")
        return node

    def _put(self, parent: _Known | None, token: int, fed: Fed) -> _Known:
        node = _Known(len(self._nodes), fed)
        self._nodes.append(node)
        if parent is None:
            self.root = node
        else:
            parent.after[token] = node
        return node

    def _load(self, file: Path) -> None:
        lines = file.read_bytes().splitlines(keepends=True)
        for at, line in enumerate(lines):
            try:
                parent, token, logprob, top, logprobs, *rest = json.loads(line)
                fed = Fed(logprob, Distribution(tuple(top), tuple(logprobs), *rest))
                self._put(None if parent < 0 else self._nodes[parent], token, fed)
            except (ValueError, TypeError, IndexError):
                # Cut off by a kill: what follows was never written whole.
                file.write_bytes(b"".join(lines[:at]))
                return


def _line(parent: _Known | None, token: int, fed: Fed) -> list[Any]:
    d = fed.distribution
    number = -1 if parent is None else parent.number
    return [
        number,
        token,
        fed.logprob,
        d.top_ids,
        d.top_logprobs,
        d.end_logprob,
        d.start_logmass,
        d.entropy,
        d.size,
    ]


class RememberingMember:
    """Another member, whose model is asked only for what is not in the memory.

    Answers are those of the member. The usage counts forwards as if nothing were remembered, but for the seconds,
    which are those that were really spent. Requests with a grammar, or that want to see more of a distribution
    than is remembered, pass the memory by. ``key`` names the weights in the memory.
    """

    def __init__(self, member: Steppable, memory: Memory, key: str | None = None) -> None:
        self.name = member.name
        self.context_window = member.context_window
        self._member = member
        self._memory = memory
        self._key = key or member.name

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, no special tokens added."""
        return self._member.tokenize(text)

    async def open(self, prompt: Prompt, settings: DecodingConfig) -> Any:
        """Start a request."""
        alphabet = self._member.alphabet
        ends = len(alphabet.ends)
        if settings.grammar or tokens_needed(settings, ends) > TOP + ends:
            return await self._member.open(prompt, settings)
        ids = self._member.prompt_ids(prompt)
        sequence = _Remembered(self._member, self._memory.after(self._key, ids), ids, _wide(settings))
        try:
            root = await sequence.start()
        except BaseException:
            await sequence.release()
            raise
        return TokenSession(
            self.name,
            alphabet,
            sequence,
            root,
            group=self._key,
            signature=tuple(ids),
            prompt_tokens=len(ids),
            context_window=self.context_window,
        )

    def close(self) -> None:
        """Close the member."""
        self._member.close()


def remembering(member: Member, memory: Memory, config: MemberConfig) -> Member:
    """The member with a memory, if its model can be stepped; else the member itself."""
    if isinstance(member, Steppable):
        return RememberingMember(member, memory, "|".join(config.weights_key()))
    return member


def _wide(settings: DecodingConfig) -> DecodingConfig:
    """Settings under which a model tells all that is remembered."""
    return DecodingConfig(
        branches=TOP,
        confidence="entropy",
        max_tokens=settings.max_tokens,
        max_words=settings.max_words,
        max_word_tokens=settings.max_word_tokens,
    )


class _Remembered:
    """`TokenSequence` over the memory; the model's own sequence is begun where the memory ends.

    ``_real``: for nodes of the tree that the model's sequence has, their numbers there. ``_behind``: tokens on the
    ledger that it has not seen yet.
    """

    def __init__(self, member: Steppable, known: _Prompt, ids: Sequence[int], wide: DecodingConfig) -> None:
        self._member = member
        self._prompt = known
        self._ids = list(ids)
        self._wide = wide
        self._sequence: TokenSequence | None = None
        self._real: dict[int, int] = {}
        self._real_parents: list[int] = []
        self._behind: list[int] = []
        self._nodes: list[_Known] = []
        self._parents: list[int] = [-1]
        self._tokens: list[int] = [-1]
        self.forward_passes = 1
        self.tokens_processed = len(self._ids)
        self.seconds = 0.0
        self.pace = 0.0
        self.reused = 0

    async def start(self) -> Distribution:
        """What follows the prompt."""
        root = self._prompt.root
        if root is None:
            _, distribution = await self._begin()
            # Another request may have asked for the same meanwhile.
            root = self._prompt.root or self._prompt.add(None, -1, Fed(0.0, distribution))
        self._nodes = [root]
        return root.fed.distribution

    async def grow(
        self, parents: Sequence[int], tokens: Sequence[int], guides: Sequence[Guide | None] = ()
    ) -> list[Fed]:
        """Feed tokens; the model sees those that are not known."""
        first = len(self._parents)
        self._parents += parents
        self._tokens += tokens
        self.forward_passes += 1
        self.tokens_processed += len(tokens)
        told = await self._ask(range(first, len(self._parents)))
        for n in range(first, len(self._parents)):
            parent, token = self._nodes[self._parents[n]], self._tokens[n]
            node = parent.after.get(token) or self._prompt.add(parent, token, told[n])
            self._nodes.append(node)
        return [node.fed for node in self._nodes[first:]]

    async def _ask(self, new: range) -> dict[int, Fed]:
        """Let the model feed those of the new nodes that are not known, and what it lacks above them."""
        known: dict[int, _Known | None] = dict(enumerate(self._nodes))
        unknown = []
        for n in new:
            parent = known[self._parents[n]]
            known[n] = parent.after.get(self._tokens[n]) if parent else None
            if known[n] is None:
                unknown.append(n)
        if not unknown:
            return {}
        sequence = self._sequence
        if sequence is None:
            sequence, _ = await self._begin()
        before = sequence.seconds
        await self._catch_up(sequence)
        needed = {n for u in unknown for n in self._path(u)} - self._real.keys()
        feeding = sorted(needed)
        at = len(self._real_parents)
        self._real |= {n: at + i for i, n in enumerate(feeding)}
        parents = [self._real[self._parents[n]] for n in feeding]
        self._real_parents += parents
        fed = await sequence.grow(parents, [self._tokens[n] for n in feeding])
        self.seconds += sequence.seconds - before
        return dict(zip(feeding, fed, strict=True))

    async def _catch_up(self, sequence: TokenSequence) -> None:
        """Feed what was committed without the model."""
        tokens, self._behind = self._behind, []
        if tokens:
            at = len(self._real_parents)
            chain = range(at, at + len(tokens))
            await sequence.grow([0, *chain[:-1]], tokens)
            await sequence.keep(chain)
            self._real, self._real_parents = {0: 0}, [-1]

    async def _begin(self) -> tuple[TokenSequence, Distribution]:
        self._sequence, root = await self._member.begin(self._ids, self._wide)
        self._behind = []
        self._real, self._real_parents = {0: 0}, [-1]
        self.seconds += self._sequence.seconds
        return self._sequence, root

    def _path(self, node: int) -> list[int]:
        path = []
        while node > 0:
            path.append(node)
            node = self._parents[node]
        return path

    async def keep(self, path: Sequence[int]) -> None:
        """Make a path part of the prefix."""
        root = path[-1] if path else 0
        self._ids += [self._tokens[n] for n in path]
        left = survivors(self._parents, root)
        if self._sequence is not None:
            if not self._behind and all(n in self._real for n in path):
                await self._sequence.keep([self._real[n] for n in path])
                real_left = survivors(self._real_parents, self._real[root])
                self._real = {left[n]: real_left[r] for n, r in self._real.items() if n in left}
                self._real_parents = _renumbered(self._real_parents, real_left)
            else:
                # It catches up when it is needed again: perhaps all that follows is known.
                self._behind += [self._tokens[n] for n in path]
                self._real = {}
        self._nodes = [self._nodes[n] for n in left]
        self._tokens = [-1, *(self._tokens[n] for n in left if n != root)]
        self._parents = _renumbered(self._parents, left)

    async def release(self) -> None:
        """Free the model's sequence."""
        if self._sequence is not None:
            sequence, self._sequence = self._sequence, None
            await sequence.release()


def _renumbered(parents: Sequence[int], left: dict[int, int]) -> list[int]:
    """The parents of the nodes that are left, by their new numbers."""
    root = next(iter(left))
    return [-1 if n == root else left[parents[n]] for n in left]
