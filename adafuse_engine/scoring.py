"""What an ensemble thinks of a given text, word by word: for likelihoods, reranking and learning weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adafuse_engine.config import DecodingConfig
from adafuse_engine.loop import together
from adafuse_engine.members.base import Session
from adafuse_engine.types import Candidate
from adafuse_engine.words import first_word_end

__all__ = ["TextScore", "score_text", "words_of"]

CHUNK = 32
"""Words that are fed in one forward."""


@dataclass(frozen=True, slots=True)
class TextScore:
    """Log-probabilities of a text after a prompt, in nats.

    Parameters
    ----------
    words
        The text, cut as the engine fuses it.
    end
        Whether the end of the text was scored as well, as a last step.
    members
        Per member, by name: for each word the log-probability that the text goes on with it and that it ends
        there, given the text before; then, if it was asked for, that of the end. They sum to the log-probability
        of the text, and over all words that are possible at one place their probabilities sum to 1.
    weights
        Of the members, summing to 1.
    """

    words: tuple[str, ...]
    end: bool
    members: Mapping[str, tuple[float, ...]]
    weights: tuple[float, ...]

    def total(self, mix: str = "arithmetic", weights: Sequence[float] | None = None) -> float:
        """The ensemble's log-probability of the text.

        ``arithmetic``: of the mixture, word by word, which is a distribution. ``geometric``: the weighted mean of
        the logarithms; probabilities then sum to less than 1, so that it never flatters.
        """
        chosen = tuple(weights) if weights is not None else self.weights
        steps = zip(*self.members.values(), strict=True)
        if mix == "geometric":
            return math.fsum(math.fsum(_product(w, v) for w, v in zip(chosen, s, strict=True)) for s in steps)
        return math.fsum(_log_mix(chosen, step) for step in steps)

    @property
    def bytes(self) -> int:
        """Bytes of the text; its end counts as one if it was scored."""
        return sum(len(word.encode()) for word in self.words) + self.end

    def bits_per_byte(self, mix: str = "arithmetic", weights: Sequence[float] | None = None) -> float:
        """Bits that the ensemble needs per byte of the text: lower is better."""
        return -self.total(mix, weights) / (max(1, self.bytes) * math.log(2))


def _product(weight: float, value: float) -> float:
    return weight * value if weight else 0.0


def _log_mix(weights: Sequence[float], values: Sequence[float]) -> float:
    said = [(w, v) for w, v in zip(weights, values, strict=True) if w > 0]
    top = max(v for _, v in said)
    if top == -math.inf:
        return top
    return top + math.log(math.fsum(w * math.exp(v - top) for w, v in said))


def words_of(text: str) -> list[bytes]:
    """The text cut into words, as the engine fuses it."""
    data = text.encode("utf-8", "replace")
    words = []
    while data:
        end = first_word_end(data) or len(data)
        words.append(data[:end])
        data = data[end:]
    return words


async def score_text(
    sessions: Sequence[Session], words: Sequence[bytes], end: bool, settings: DecodingConfig
) -> list[list[float]]:
    """Per session the log-probability of each word, and of the end after them. Raises `OutOfRoom`.

    The sessions were opened with ``settings``, which count word ends.
    """
    told: list[list[float]] = [[] for _ in sessions]
    # The mass that the word before ended where it did: given that it did, this one is more probable.
    before = [0.0] * len(sessions)
    chunks = [tuple(words[at : at + CHUNK]) for at in range(0, len(words), CHUNK)] or [()]
    for number, chunk in enumerate(chunks):
        last = number == len(chunks) - 1
        # Where nothing follows and no end is asked for, the text may go on within its last word.
        closed = tuple(not (last and i == len(chunk) - 1 and not end) for i in range(len(chunk)))
        candidate = Candidate(chunk, end and last, closed)
        scores = await together(s.score([candidate], settings) for s in sessions)
        for k, [score] in enumerate(scores):
            reached = before[k]
            for logprob, boundary in zip(score.logprobs, score.boundary, strict=True):
                told[k].append(logprob + boundary - reached)
                reached = logprob + boundary
            if candidate.end:
                told[k].append(score.total - reached)
            before[k] = score.boundary[-1] if score.boundary else before[k]
        if not last:
            await together(s.commit(chunk) for s in sessions)
    return told
