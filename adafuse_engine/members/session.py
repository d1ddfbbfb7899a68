"""A member's side of a request, for members that can step a model token by token.

A round lives in a tree of tokens under the end of the ledger (node 0). Proposing and scoring both walk this
tree and feed only what it lacks, in as few calls as there are levels; committing keeps one path of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from adafuse_engine.confidence import Distribution, confidence
from adafuse_engine.config import ConfidenceKind, DecodingConfig
from adafuse_engine.errors import MemberError, NonFiniteLogitsError
from adafuse_engine.members.base import OutOfRoom
from adafuse_engine.members.guide import Guide
from adafuse_engine.scaling import first_tokens
from adafuse_engine.types import Branch, Candidate, MemberUsage, Score
from adafuse_engine.words import ends_by_itself, first_word_end, incomplete_suffix

__all__ = ["Alphabet", "Fed", "TokenSequence", "TokenSession", "survivors"]

ROOT = 0


def survivors(parents: Sequence[int], root: int) -> dict[int, int]:
    """The node ``root`` and those below it, each with its number in the tree that `TokenSequence.keep` leaves.

    ``parents[n]`` is node n's parent; parents come before children, so one pass in order finds all.
    """
    kept = {root: ROOT}
    for node in range(root + 1, len(parents)):
        if parents[node] in kept:
            kept[node] = len(kept)
    return kept


class Alphabet(Protocol):
    """A member's tokens as bytes."""

    @property
    def ends(self) -> frozenset[int]:
        """Every token that ends the text."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """What the token writes."""
        ...

    def can_write(self, data: bytes) -> bool:
        """Whether there are tokens for all of ``data``."""
        ...

    def encode(self, data: bytes) -> list[int]:
        """Tokens that write exactly ``data``, as a continuation: no prefix space, no special tokens."""
        ...

    def spell(self, token: int) -> list[int]:
        """The token in the tokens that this member's guides are over; most often itself."""
        ...


@dataclass(frozen=True, slots=True)
class Fed:
    """A token that went through the model: its log-probability under its parent, and what follows it."""

    logprob: float
    distribution: Distribution


class TokenSequence(Protocol):
    """A model's state for one request: a committed prefix and a tree of tokens under its end."""

    @property
    def forward_passes(self) -> int:
        """Forwards so far."""
        ...

    @property
    def tokens_processed(self) -> int:
        """Tokens fed so far."""
        ...

    @property
    def seconds(self) -> float:
        """Time of the forwards so far."""
        ...

    @property
    def pace(self) -> float:
        """Seconds that a forward of a few tokens takes; 0 if none was measured."""
        ...

    @property
    def reused(self) -> int:
        """Tokens of the prompt that were not fed, because an earlier request had computed them."""
        ...

    async def grow(
        self, parents: Sequence[int], tokens: Sequence[int], guides: Sequence[Guide | None] = ()
    ) -> list[Fed]:
        """Feed tokens in one forward. Nodes are numbered in order from 1; parents come before children.

        With ``guides``, one per token, what follows it is kept to what its guide allows; to nothing where it
        has none, for the token is not allowed itself.
        """
        ...

    async def keep(self, path: Sequence[int]) -> None:
        """Make the nodes of ``path``, from the root down, part of the prefix, and its last one the root.

        Nodes below it stay, renumbered from 1 in the order they have; all others are dropped.
        """
        ...

    async def release(self) -> None:
        """Free everything."""
        ...


@dataclass(slots=True)
class _Node:
    parent: int
    token: int
    logprob: float = 0.0
    distribution: Distribution | None = None
    guide: Guide | None = None


@dataclass(slots=True)
class _Growing:
    """A word that is being completed greedily; ``node`` is its last token's."""

    node: int
    data: bytes = b""
    tokens: int = 0
    closed: bool = True


class TokenSession:
    """`Session` over a `TokenSequence` whose prefix is the prompt."""

    def __init__(
        self,
        name: str,
        alphabet: Alphabet,
        sequence: TokenSequence,
        root: Distribution,
        *,
        group: Hashable,
        signature: Hashable,
        prompt_tokens: int,
        context_window: int,
        guide: Guide | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.signature = (group, signature)
        self._alphabet = alphabet
        self._sequence = sequence
        self._prompt_tokens = prompt_tokens
        self._window = context_window
        self._committed: list[int] = []
        self._deferred: list[bytes] = []
        self._closed = False
        self._counts = {"drafted": 0, "accepted": 0, "branches_skipped": 0}
        self._certain: tuple[tuple[bytes, ...], tuple[bool, ...], int] = (), (), ROOT
        self._begun: dict[int, int] = {}
        self._guided = guide is not None
        self._start([_Node(-1, -1, 0.0, root, guide)])

    def _start(self, nodes: list[_Node]) -> None:
        """Begin a round at the end of the ledger, with what is known beyond it."""
        self._nodes = nodes
        self._children = {(node.parent, node.token): n for n, node in enumerate(nodes) if n != ROOT}
        self._unfed: list[int] = []
        self._drafted = range(0)
        # Word paths to nodes: those this member wrote itself, and those it tokenised to score others'.
        self._own: dict[tuple[bytes, ...], int] = {(): ROOT}
        self._encoded: dict[tuple[bytes, ...], int] = {}

    # ---- what the loop may ask at any time

    @property
    def room(self) -> int:
        """Tokens that still fit the context window."""
        return self._window - self._prompt_tokens - len(self._committed) - len(self._deferred)

    @property
    def committed(self) -> bytes:
        """The ledger, as this member's committed tokens spell it."""
        return b"".join(map(self._alphabet.bytes_of, self._committed)) + b"".join(self._deferred)

    def confidence(self, kind: ConfidenceKind) -> float:
        """At the end of the ledger, in [0, 1]."""
        return confidence(self._at(ROOT), kind)

    def can_write(self, data: bytes) -> bool:
        """Whether this member has tokens for these bytes."""
        return self._alphabet.can_write(data)

    def usage(self) -> MemberUsage:
        """What the request cost so far."""
        sequence = self._sequence
        return MemberUsage(
            self.name,
            self._prompt_tokens,
            sequence.tokens_processed,
            sequence.forward_passes,
            sequence.seconds,
            sequence.reused,
            **self._counts,
        )

    def skip(self, branches: int) -> None:
        """Count branches that are left unwritten."""
        self._counts["branches_skipped"] += branches

    @property
    def pace(self) -> float:
        """Seconds that a forward of a few tokens takes."""
        return self._sequence.pace

    def pieces(self, words: Sequence[bytes]) -> list[bytes]:
        """The words as this member's tokens, each as bytes."""
        node = None if self._deferred else self._find(tuple(words))
        if node is None:
            tokens = [t for word in words for t in self._alphabet.encode(word)]
        else:
            tokens = [self._nodes[n].token for n in self._path(node)]
        return list(map(self._alphabet.bytes_of, tokens))

    # ---- proposing

    async def outline(self, settings: DecodingConfig, random: Random) -> list[Candidate | Branch]:
        """Certain words, then branches; of those the most probable to the end of its word."""
        words, closed, node, ended = await self._certain_words(settings)
        if ended or len(words) == settings.max_words:
            self._count_accepted(node)
            return [Candidate(words, ended, closed)]
        here = self._at(node)
        likely = dict(zip(here.top_ids, here.top_logprobs, strict=True))
        self._certain = words, closed, node
        self._begun = {}
        outline: list[Candidate | Branch] = []
        for token in first_tokens(here, self._alphabet.ends, settings, random):
            if token in self._alphabet.ends:
                outline.append(Candidate(words, True, closed))
                continue
            branch = Branch(words, self._nodes[node].logprob + likely[token])
            self._begun[id(branch)] = token
            outline.append(branch)
        if isinstance(first := outline[0], Branch):
            [outline[0]] = await self.complete([first], settings)
        self._count_accepted(self._own[outline[0].words])
        return outline

    async def complete(self, branches: Sequence[Branch], settings: DecodingConfig) -> list[Candidate]:
        """Write branches of the last outline greedily to the end of their words, side by side."""
        words, closed, node = self._certain
        grown = await self._complete([(node, self._begun[id(b)]) for b in branches], settings)
        for branch in grown:
            self._own.setdefault((*words, branch.data), branch.node)
        return [Candidate((*words, b.data), False, (*closed, b.closed)) for b in grown]

    async def consider(self, drafts: Sequence[Candidate]) -> None:
        """Feed others' candidates, all in one forward: where this member would write the same, it is done."""
        before = len(self._nodes)
        for candidate in drafts:
            self._word_nodes(candidate.words)
        await self._feed()
        self._drafted = range(before, len(self._nodes))
        self._counts["drafted"] += len(self._drafted)

    def _count_accepted(self, node: int) -> None:
        self._counts["accepted"] += sum(n in self._drafted for n in self._path(node))

    async def lead(self, settings: DecodingConfig) -> Candidate:
        """The certain words alone."""
        words, closed, _, ended = await self._certain_words(settings)
        return Candidate(words, ended, closed)

    async def _certain_words(
        self, settings: DecodingConfig
    ) -> tuple[tuple[bytes, ...], tuple[bool, ...], int, bool]:
        """Greedy words while certain at each word start: the words, closed flags, last node, and end."""
        words: tuple[bytes, ...] = ()
        closed: tuple[bool, ...] = ()
        node = ROOT
        while len(words) < settings.max_words:
            here = self._at(node)
            if confidence(here, settings.confidence) < settings.threshold:
                break
            if here.greedy in self._alphabet.ends:
                return words, closed, node, True
            [word] = await self._complete([(node, here.greedy)], settings)
            words, closed, node = (*words, word.data), (*closed, word.closed), word.node
            self._own.setdefault(words, node)
        return words, closed, node, False

    async def _complete(self, starts: list[tuple[int, int]], settings: DecodingConfig) -> list[_Growing]:
        """Write each (parent, first token) greedily to the end of its word, all of them side by side."""
        growing = [_Growing(self._want(parent, token)) for parent, token in starts]
        active = growing
        while active:
            await self._feed()
            active = [g for g in active if self._goes_on(g, settings)]
        return growing

    def _goes_on(self, word: _Growing, settings: DecodingConfig) -> bool:
        """Add the token just fed to its word; if the word goes on, want its next token."""
        word.data += self._alphabet.bytes_of(self._nodes[word.node].token)
        word.tokens += 1
        following = self._at(word.node).greedy
        if following in self._alphabet.ends:
            return False
        inside_character = incomplete_suffix(word.data) > 0
        end = first_word_end(word.data + self._alphabet.bytes_of(following))
        if end is not None and end <= len(word.data) and not inside_character:
            return False
        # A character is at most four tokens, so waiting for its end is bounded too.
        if word.tokens >= settings.max_word_tokens + 3 * inside_character:
            word.closed = False
            return False
        word.node = self._want(word.node, following)
        return True

    # ---- scoring

    async def score(self, candidates: Sequence[Candidate], settings: DecodingConfig) -> list[Score]:
        """Log-probabilities of the candidates' words and ends under this member's own tokenisation."""
        # Afresh: what it spelled itself since takes the place of what was encoded.
        self._encoded.clear()
        paths = [self._word_nodes(candidate.words) for candidate in candidates]
        await self._feed()
        return [self._score(c, nodes, settings) for c, nodes in zip(candidates, paths, strict=True)]

    def _word_nodes(self, words: tuple[bytes, ...]) -> list[int]:
        """The node at the end of each word; a word without one is encoded under the one before."""
        nodes: list[int] = []
        for depth, word in enumerate(words, start=1):
            node = self._find(words[:depth])
            if node is None:
                node = nodes[-1] if nodes else ROOT
                for token in self._alphabet.encode(word):
                    node = self._want(node, token)
                self._encoded[words[:depth]] = node
            nodes.append(node)
        return nodes

    def _score(self, candidate: Candidate, nodes: list[int], settings: DecodingConfig) -> Score:
        boundary = []
        for word, node, closed in zip(candidate.words, nodes, candidate.closed, strict=True):
            counts = settings.counts_word_ends and closed and not ends_by_itself(word)
            boundary.append(self._fed(node).start_logmass if counts else 0.0)
        last = nodes[-1] if nodes else ROOT
        return Score(
            tuple(self._nodes[node].logprob for node in nodes),
            tuple(boundary),
            len(self._path(last)) + candidate.end,
            self._fed(last).end_logprob if candidate.end else None,
        )

    # ---- committing

    async def commit(self, words: Sequence[bytes]) -> None:
        """Append words to the ledger."""
        await self.sync()
        if not words:
            return
        node = self._word_nodes(tuple(words))[-1]
        await self._feed()
        path = self._path(node)
        self._committed.extend(self._nodes[n].token for n in path)
        await self._sequence.keep(path)
        self._start(self._below(node))

    def defer(self, words: Sequence[bytes]) -> None:
        """Append words to the ledger without computing anything yet."""
        self._deferred.extend(words)

    async def sync(self) -> None:
        """Catch up with deferred words in one forward."""
        if self._deferred:
            words, self._deferred = self._deferred, []
            await self.commit(words)

    async def close(self) -> None:
        """Free all the request holds."""
        if not self._closed:
            self._closed = True
            await self._sequence.release()

    # ---- the tree

    def _at(self, node: int) -> Distribution:
        """The distribution after a node; a NaN there is an error, for nothing can be written from it."""
        distribution = self._fed(node)
        if not distribution.finite:
            if self._guided:
                raise MemberError(
                    f"member {self.name!r} has no token that the grammar allows after {self.committed[-40:]!r}, "
                    "or returned NaN logits"
                )
            raise NonFiniteLogitsError(self.name)
        return distribution

    def _fed(self, node: int) -> Distribution:
        distribution = self._nodes[node].distribution
        if distribution is None:
            raise RuntimeError("a node was read before it was fed")
        return distribution

    def _find(self, words: tuple[bytes, ...]) -> int | None:
        """Where the words lead: this member's own spelling first, so that order of asking changes nothing."""
        return self._own.get(words, self._encoded.get(words))

    def _want(self, parent: int, token: int) -> int:
        """The child node, to be fed with the next `_feed` if it is new."""
        node = self._children.get((parent, token))
        if node is None:
            node = len(self._nodes)
            self._nodes.append(_Node(parent, token))
            self._children[parent, token] = node
            self._unfed.append(node)
        return node

    async def _feed(self) -> None:
        """Feed all wanted nodes in one forward."""
        nodes, self._unfed = self._unfed, []
        if not nodes:
            return
        if max(len(self._path(n)) for n in nodes) > self.room:
            raise OutOfRoom
        guides = [self._guide(n) for n in nodes] if self._guided else []
        fed = await self._sequence.grow(
            [self._nodes[n].parent for n in nodes], [self._nodes[n].token for n in nodes], guides
        )
        for n, result in zip(nodes, fed, strict=True):
            node = self._nodes[n]
            node.logprob = self._nodes[node.parent].logprob + result.logprob
            node.distribution = result.distribution

    def _guide(self, n: int) -> Guide | None:
        """The node's place in the grammar: its parent's, and its token after it."""
        node = self._nodes[n]
        before = self._nodes[node.parent].guide
        node.guide = before.after(self._alphabet.spell(node.token)) if before else None
        return node.guide

    def _below(self, root: int) -> list[_Node]:
        """The tree under a node as a tree of its own: what was looked ahead is not computed again."""
        renumbered = survivors([node.parent for node in self._nodes], root)
        base = self._nodes[root].logprob
        below = [self._nodes[n] for n in list(renumbered)[1:]]
        return [
            _Node(-1, -1, 0.0, self._fed(root), self._nodes[root].guide),
            *(_Node(renumbered[n.parent], n.token, n.logprob - base, n.distribution, n.guide) for n in below),
        ]

    def _path(self, node: int) -> list[int]:
        """Nodes from below the root down to ``node``."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self._nodes[node].parent
        return path[::-1]
