"""What the members propose in one round: the union of their candidates, less those that cannot win."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random

from adafuse_engine.config import DecodingConfig
from adafuse_engine.errors import MemberError
from adafuse_engine.fusion import Rules, can_win, is_worth_scoring
from adafuse_engine.loop import together
from adafuse_engine.types import Branch, Candidate, Score
from adafuse_engine.voices import Voice

__all__ = ["Proposals", "Proposing", "UnwritableError"]


class UnwritableError(MemberError):
    """No candidate can be written by every member's tokenizer."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Candidates in order, who proposed each, and per member all scores if they were needed already."""

    candidates: list[Candidate]
    proposers: list[tuple[str, ...]]
    scores: list[Sequence[Score]]


class Proposing:
    """Asks the members of one round.

    ``possible``: whether a candidate may be written at all; ``random``: what a member of that number draws by.
    """

    def __init__(
        self,
        voices: Sequence[Voice],
        rules: Rules,
        possible: Callable[[Candidate], bool],
        random: Callable[[str], Random],
        within: str = "",
    ) -> None:
        self.voices = voices
        self.sessions = [v.session for v in voices]
        self.rules = rules
        self._possible = possible
        self._random = random
        self._within = within

    async def ask(self, settings: DecodingConfig) -> Proposals:
        """The union of what can still win. Raises `UnwritableError` if none of it is possible."""
        outlines = await self._outlines(settings)
        whole = [[c for c in outline if isinstance(c, Candidate)] for outline in outlines]
        begun = [[b for b in outline if isinstance(b, Branch)] for outline in outlines]
        if not any(begun):
            return self._union(whole)
        wanted = begun
        known: list[Candidate] = []
        scores: list[list[Score]] = []
        # Without a bound that could use them, scores in between would be work for nothing.
        early = settings.early_decisions and (self.rules.bounds_branches or self.rules.bounds_candidates)
        if early:
            known = self._union(whole).candidates
            scores = await together(s.score(known, settings) for s in self.sessions)
            weights = [v.weight for v in self.voices]
            wanted = [
                [b for b in branches if can_win(b, k, known, scores, weights, self.rules)]
                for k, branches in enumerate(begun)
            ]
            for session, branches, few in zip(self.sessions, begun, wanted, strict=True):
                session.skip(len(branches) - len(few))
            if not any(wanted):
                return self._union(whole, scores)
        completed = await together(
            s.complete(branches, settings) for s, branches in zip(self.sessions, wanted, strict=True)
        )
        written: list[list[Candidate | None]] = [list(made) for made in completed]
        if early and self.rules.bounds_candidates:
            await self._strike_out(written, known, scores, settings)
        proposals = []
        for outline, branches, made in zip(outlines, wanted, written, strict=True):
            done = dict(zip(map(id, branches), made, strict=True))
            found = [c if isinstance(c, Candidate) else done.get(id(c)) for c in outline]
            proposals.append([c for c in found if c is not None])
        return self._union(proposals)

    async def _outlines(self, settings: DecodingConfig) -> list[list[Candidate | Branch]]:
        """What each member proposes. With drafting the fastest go first, and the others check theirs first.

        Members on the same weights propose together: their forwards are one.
        """
        groups: dict[Hashable, list[int]] = {}
        for k, session in enumerate(self.sessions):
            groups.setdefault(session.group if settings.drafting else None, []).append(k)
        outlines: list[list[Candidate | Branch]] = [[] for _ in self.sessions]
        drafts: list[Candidate] = []
        for group in sorted(groups.values(), key=lambda ks: self.sessions[ks[0]].pace):
            if drafts:
                await together(self.sessions[k].consider(drafts) for k in group)
            made = await together(self.sessions[k].outline(settings, self._random(str(k))) for k in group)
            for k, outline in zip(group, made, strict=True):
                outlines[k] = outline
                drafts += [c for c in outline if isinstance(c, Candidate) and self._possible(c)]
        return outlines

    async def _strike_out(
        self,
        written: list[list[Candidate | None]],
        known: list[Candidate],
        scores: list[list[Score]],
        settings: DecodingConfig,
    ) -> None:
        """Put None for candidates that their proposer likes too little for them to win: nobody need score them."""
        weights = [v.weight for v in self.voices]
        for k, (session, made) in enumerate(zip(self.sessions, written, strict=True)):
            own = await session.score([c for c in made if c is not None], settings)
            for i, (candidate, score) in enumerate(zip(list(made), own, strict=True)):
                if candidate is not None and not is_worth_scoring(
                    candidate, k, score, known, scores, weights, self.rules
                ):
                    made[i] = None

    def _union(self, proposals: Sequence[list[Candidate]], scores: Sequence[Sequence[Score]] = ()) -> Proposals:
        """Distinct candidates by bytes and end, in member order and then proposal order; who proposed each."""
        found: dict[tuple[bytes, bool], Candidate] = {}
        names: dict[tuple[bytes, bool], list[str]] = {}
        for voice, proposal in zip(self.voices, proposals, strict=True):
            for candidate in proposal:
                found.setdefault(candidate.key, candidate)
                proposers = names.setdefault(candidate.key, [])
                if voice.name not in proposers:
                    proposers.append(voice.name)
        usable = [key for key, candidate in found.items() if self._possible(candidate)]
        if not usable:
            texts = ", ".join(repr(c.data.decode("utf-8", "replace")) for c in found.values())
            raise UnwritableError(
                f"no candidate ({texts}) can be written by every member's tokenizer{self._within}"
            )
        return Proposals([found[key] for key in usable], [tuple(names[key]) for key in usable], list(scores))
