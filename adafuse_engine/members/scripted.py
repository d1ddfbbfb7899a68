"""A member without weights: it writes a given answer with a given confidence. For tests, docs and demos."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from adafuse_engine.chat.forms import tool_form
from adafuse_engine.confidence import Distribution
from adafuse_engine.config import DecodingConfig
from adafuse_engine.errors import ContextWindowError, EmptyPromptError
from adafuse_engine.members.guide import END_OF_TEXT, Guide, byte_guides
from adafuse_engine.members.session import Fed, TokenSession, survivors
from adafuse_engine.messages import messages_of
from adafuse_engine.types import Chat, Message, Prompt
from adafuse_engine.words import first_word_end

__all__ = ["ScriptedMember"]

_END = 256
_AND = 257
_PIECE = regex.compile(r"\s*\S{1,4}|\s+")


class ScriptedMember:
    """Writes ``answer`` to every prompt, as a real member would: token by token, gated, scored, fused.

    Parameters
    ----------
    name
        The member's name.
    answer
        What it writes, or a function from the prompt's text to that. Chat messages are given to it as lines
        ``role: content`` and a last line ``assistant:``; tools as a first ``system:`` line, and calls as text
        of their messages, both in the chat's tool form.
    confidence
        Its margin at every token, in [0, 1]. The scripted token leads the next best (the word " and") by it;
        every other token is a little less probable than that.
    context_window
        In tokens of at most four characters.
    delay
        Seconds that each forward takes, without holding the event loop.
    on_forward
        Called with the number of each forward (from 1, over all requests) before it runs; may raise.
    nan_from
        The number of the forward from which on all its logits are NaN.

    Where the ledger is not what it would have written, it goes on with the word that its answer has at that
    place. ``open_sessions`` counts the requests it is in.
    """

    def __init__(
        self,
        name: str,
        answer: str | Callable[[str], str] = "",
        *,
        confidence: float = 0.9,
        context_window: int = 4096,
        delay: float = 0.0,
        on_forward: Callable[[int], None] | None = None,
        nan_from: int | None = None,
    ) -> None:
        self.name = name
        self.context_window = context_window
        self.open_sessions = 0
        self.forwards = 0
        self.prompts: list[str] = []
        self._answer = answer
        second = max(0.1 * (1 - confidence), 1e-6)
        self._scripted = math.log(min(1.0, confidence + second))
        self._second = math.log(second)
        self.other = math.log(0.9 * second)
        self._delay = delay
        self._on_forward = on_forward
        self._nan_from = nan_from
        self._pieces: list[bytes] = [bytes([b]) for b in range(256)] + [b"", b" and"]
        self._ids: dict[bytes, int] = {p: i for i, p in enumerate(self._pieces) if i != _END}

    # ---- Alphabet

    @property
    def ends(self) -> frozenset[int]:
        """Its one end token."""
        return frozenset({_END})

    def bytes_of(self, token: int) -> bytes:
        """What the token writes."""
        return self._pieces[token]

    def can_write(self, data: bytes) -> bool:
        """It has a token for every byte."""
        return True

    def encode(self, data: bytes) -> list[int]:
        """Pieces of up to four characters, each with the whitespace before it; single bytes if not UTF-8."""
        try:
            pieces = [p.encode() for p in _PIECE.findall(data.decode())]
        except UnicodeDecodeError:
            return list(data)
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
        return [self._ids[piece] for piece in pieces]

    def spell(self, token: int) -> list[int]:
        """Its guides are over bytes."""
        return [END_OF_TEXT] if token == _END else list(self._pieces[token])

    # ---- Member

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text."""
        return self.encode(text.encode())

    async def open(self, prompt: Prompt, settings: DecodingConfig) -> TokenSession:
        """Start a request."""
        text = prompt if isinstance(prompt, str) else _render(prompt)
        if not text.strip() and text:
            raise EmptyPromptError(f"the prompt for member {self.name!r} has no text")
        tokens = len(self.tokenize(text))
        if tokens >= self.context_window:
            raise ContextWindowError(self.name, tokens, self.context_window)
        self.prompts.append(text)
        answer = self._answer if isinstance(self._answer, str) else self._answer(text)
        guide = await byte_guides().start(settings.grammar) if settings.grammar else None
        sequence = _ScriptedSequence(self, answer.encode(), tokens)
        self.open_sessions += 1
        try:
            root = await sequence.prefill(guide)
        except BaseException:
            await sequence.release()
            raise
        return TokenSession(
            self.name,
            self,
            sequence,
            root,
            group=id(self),
            signature=text,
            prompt_tokens=tokens,
            context_window=self.context_window,
            guide=guide,
        )

    def close(self) -> None:
        """Nothing to free."""

    async def forward(self) -> bool:
        """Let one forward pass; whether its logits are NaN."""
        self.forwards += 1
        number = self.forwards
        if self._on_forward:
            self._on_forward(number)
        await asyncio.sleep(self._delay)
        return self._nan_from is not None and number >= self._nan_from

    def after(self, answer: bytes, written: bytes, guide: Guide | None = None) -> dict[int, float]:
        """Log-probabilities of the most probable tokens after ``written``, best first; others: ``other``.

        Where a grammar allows none of them, of one token that it allows.
        """
        likely = self._likely(answer, written)
        if guide is None:
            return likely
        allowed = {token: lp for token, lp in likely.items() if guide.allows(self.spell(token))}
        out = guide.way_out()
        return allowed or {out[0] if out else _END: self._scripted}

    def _likely(self, answer: bytes, written: bytes) -> dict[int, float]:
        rest = answer[len(written) :] if answer.startswith(written) else _from_word(answer, written)
        token = self.encode(rest)[0] if rest else _END
        return (
            {token: self._scripted}
            | ({_AND: self._second} if token != _AND else {})
            | ({_END: self.other} if token != _END else {})
        )


class _ScriptedSequence:
    """`TokenSequence` over bytes: what a node has written decides what follows it."""

    def __init__(self, member: ScriptedMember, answer: bytes, prompt_tokens: int) -> None:
        self._member = member
        self._answer = answer
        self._written = [b""]
        self._guides: list[Guide | None] = [None]
        self._parents = [-1]
        self._released = False
        self.forward_passes = 0
        self.tokens_processed = prompt_tokens
        self.seconds = 0.0
        self.pace = 0.0
        self.reused = 0

    async def prefill(self, guide: Guide | None) -> Distribution:
        self.forward_passes += 1
        self._guides = [guide]
        return self._distribution(0, await self._member.forward())

    async def grow(
        self, parents: Sequence[int], tokens: Sequence[int], guides: Sequence[Guide | None] = ()
    ) -> list[Fed]:
        nan = await self._member.forward()
        self.forward_passes += 1
        self.tokens_processed += len(tokens)
        fed = []
        for i, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            logprob = self._after(parent).get(token, self._member.other)
            self._written.append(self._written[parent] + self._member.bytes_of(token))
            self._guides.append(guides[i] if guides else None)
            self._parents.append(parent)
            fed.append(Fed(math.nan if nan else logprob, self._distribution(len(self._written) - 1, nan)))
        return fed

    async def keep(self, path: Sequence[int]) -> None:
        if path:
            kept = survivors(self._parents, path[-1])
            self._parents = [-1, *(kept[self._parents[n]] for n in list(kept)[1:])]
            self._written = [self._written[n] for n in kept]
            self._guides = [self._guides[n] for n in kept]

    async def release(self) -> None:
        if not self._released:
            self._released = True
            self._member.open_sessions -= 1

    def _after(self, node: int) -> dict[int, float]:
        return self._member.after(self._answer, self._written[node], self._guides[node])

    def _distribution(self, node: int, nan: bool) -> Distribution:
        likely = self._after(node)
        logprobs = [math.nan if nan else lp for lp in likely.values()]
        first = next(iter(likely))
        starts_word = first == _END or self._member.bytes_of(first)[:1].isspace()
        return Distribution(
            tuple(likely),
            tuple(logprobs),
            math.nan if nan else likely.get(_END, self._member.other),
            math.nan if nan else 0.0 if starts_word else likely.get(_END, self._member.other),
            -math.fsum(math.exp(lp) * lp for lp in likely.values()),
            1000,
        )


def _render(prompt: Sequence[Message | Mapping[str, Any]] | Chat) -> str:
    """The chat as lines: the tools in a first system line, calls as the chat's tool form writes them."""
    chat = prompt if isinstance(prompt, Chat) else Chat(prompt)
    form = tool_form(chat.tool_form)
    lines = [f"system: {form.instructions(chat.tools)}\n"] if chat.tools else []
    for message in messages_of(chat):
        written = [message.content, form.write(message.tool_calls) if message.tool_calls else ""]
        lines.append(f"{message.role}: {chr(10).join(filter(None, written))}\n")
    return "".join([*lines, "assistant:"])


def _from_word(answer: bytes, written: bytes) -> bytes:
    """The answer from the word on that comes after as many words as were written."""
    words = 0
    while written:
        written = written[first_word_end(written) or len(written) :]
        words += 1
    for _ in range(words):
        answer = answer[first_word_end(answer) or len(answer) :]
    return answer
