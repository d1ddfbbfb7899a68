"""The plain road: the reference decoder, timed for a few words."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from adafuse_engine import DecodingConfig
from tests.reference.decoder import Reference, decode


class Enough(Exception):
    """So many words are written."""


@dataclass
class PlainMember(Reference):
    """Remembers a distribution within a round, and nothing from one round to the next.

    ``passes``: forwards made; ``asked``: those there would be if it remembered nothing at all.
    """

    enough: int | None = None
    passes: int = 0
    asked: int = 0
    rounds: int = -1

    def __post_init__(self):
        self.prompt = self.seen = len(self.ids)
        self.rounds = 0

    @property
    def text(self):
        """What whole rounds have written."""
        return b"".join(map(self.vocabulary.bytes_of, self.ids[self.prompt :]))

    def logprobs(self, extra):
        if len(self.ids) != self.seen:
            self.seen = len(self.ids)
            self.known.clear()
            self.rounds += 1
            if self.enough is not None and len(self.text.split()) >= self.enough:
                raise Enough
        self.asked += 1
        self.passes += (*self.ids, *extra) not in self.known
        return super().logprobs(extra)


@dataclass(frozen=True)
class Walk:
    """What the plain road took: only whole rounds are counted, on both sides of seconds / words."""

    seconds: float
    text: str
    rounds: int
    passes: int
    asked: int

    @property
    def words(self):
        return len(self.text.split())


def walk(members, prompt, words, tokens, **options):
    """Go the plain road until a round ends with so many words written, or the text with fewer."""
    road = [
        PlainMember(m.model.runner.model, m.model.vocabulary, m.prompt_ids(prompt), enough=None if i else words)
        for i, m in enumerate(members)
    ]
    start = perf_counter()
    try:
        written = decode(road, DecodingConfig(max_tokens=tokens, **options))
        rounds = road[0].rounds + 1
    except Enough:
        written, rounds = road[0].text, road[0].rounds
    seconds = perf_counter() - start
    text = written.decode("utf-8", "replace")
    return Walk(seconds, text, rounds, sum(m.passes for m in road), sum(m.asked for m in road))
