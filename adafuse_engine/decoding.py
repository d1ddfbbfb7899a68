"""The loop of one request (DESIGN section 3): confidence, gate, propose, union, score, commit. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from adafuse_engine.adaptive import AdaptiveWeights
from adafuse_engine.config import DecodingConfig
from adafuse_engine.errors import MemberError
from adafuse_engine.fusion import Decision, Rules, fuse
from adafuse_engine.guarded import GuardedSession
from adafuse_engine.held import Held
from adafuse_engine.loop import together
from adafuse_engine.members.base import OutOfRoom
from adafuse_engine.members.guide import Guide
from adafuse_engine.output import Output
from adafuse_engine.proposals import Proposing, UnwritableError
from adafuse_engine.service import Governor, Plan, Progress
from adafuse_engine.trace import CandidateTrace, Failure, Round, Trace
from adafuse_engine.types import Candidate, FinishReason, Score
from adafuse_engine.voices import Voice

__all__ = ["Emit", "Written", "decode", "ignore"]


@dataclass(frozen=True, slots=True)
class Written:
    """How a request ended. ``tokens``: what was committed, counted by the first member."""

    text: str
    finish_reason: FinishReason
    tokens: int


Emit = Callable[[str, Round], None]
"""Called with each piece of text that is certain to be part of the answer, and the round it came with."""


def ignore(text: str, round_: Round) -> None:
    """`Emit` for callers that want the whole answer only."""


async def decode(
    voices: Sequence[Voice],
    settings: DecodingConfig,
    trace: Trace,
    emit: Emit = ignore,
    governor: Governor | None = None,
    guide: Guide | None = None,
) -> Written:
    """Write one answer; rounds are appended to ``trace``, whose seed is used.

    A governor keeps service levels. A guide, over bytes, holds the answer to the settings' grammar.
    """
    return await _Decoder(voices, settings, trace, emit, governor, guide).run()


class _Decoder:
    def __init__(
        self,
        voices: Sequence[Voice],
        settings: DecodingConfig,
        trace: Trace,
        emit: Emit,
        governor: Governor | None,
        guide: Guide | None,
    ) -> None:
        self.voices = list(voices)
        self.sessions = [v.session for v in voices]
        self.settings = settings
        self.trace = trace
        self.emit = emit
        self.governor = governor
        self.held = Held(guide, self.sessions[0].pieces) if guide else None
        self.plan = Plan(settings)
        self.weights = AdaptiveWeights([v.weight for v in voices], settings.adaptive_weights)
        self._guards = [s for s in self.sessions if isinstance(s, GuardedSession)]
        self.text = Output(settings.stop)
        self.tokens = 0
        self.leader: int | None = None
        self._cut = False
        self._words: tuple[bytes, ...] = ()
        self.rules = Rules(
            settings.fusion,
            settings.mix == "arithmetic" or (settings.mix == "auto" and settings.fusion == "vote"),
            settings.temperature,
        )

    async def run(self) -> Written:
        settings = self._settle()
        if self.governor:
            self.governor.begin(settings, len(self.voices))
        try:
            for index in count():
                if self.governor:
                    settings = await self._serve(self.governor)
                now = self._within_room(settings)
                if self.held:
                    now = self.held.near_the_end(now, settings.max_tokens - self.tokens)
                round_ = await self._round(index, now)
                if self.held and not self.held.can_end_after(
                    self._words, round_.end, settings.max_tokens - self.tokens
                ):
                    round_ = self._last(index)
                if self.plan.report:
                    round_ = replace(round_, service=self.plan.report)
                self.trace.rounds.append(round_)
                if (reason := self._append(round_)) is not None:
                    return self._finish(reason)
                await self._commit(round_, now)
                if self._guards:
                    self._drop_failed(index + 1)
        except OutOfRoom:
            pass
        return self._finish("length")

    async def _round(self, index: int, settings: DecodingConfig) -> Round:
        """What is committed next; where members fail on the way, by those that are left."""
        while True:
            try:
                round_ = self._forced(index)
                if round_ is None and settings.gate == "any_certain":
                    round_ = await self._lead(index, settings)
                round_ = round_ or await self._fuse_or_retry(index, settings)
            except MemberError:
                # Without those that failed meanwhile it may be possible after all.
                if not self._drop_failed(index):
                    raise
            else:
                self._drop_failed(index)
                return round_

    def _drop_failed(self, index: int) -> bool:
        """Go on without members that failed; whether there were any. The last one's error is raised."""
        failed = {id(g): g.failure for g in self._guards if g.failure is not None}
        if not failed:
            return False
        left = [k for k, s in enumerate(self.sessions) if id(s) not in failed]
        for voice in self.voices:
            if (error := failed.get(id(voice.session))) is not None:
                self.trace.failures.append(Failure(index, voice.name, str(error)))
        if not any(self.voices[k].weight > 0 for k in left):
            raise next(iter(failed.values()))
        self.voices = [self.voices[k] for k in left]
        self.sessions = [self.sessions[k] for k in left]
        self._guards = [s for s in self.sessions if isinstance(s, GuardedSession)]
        self.weights = AdaptiveWeights([v.weight for v in self.voices], self.settings.adaptive_weights)
        if self.held:
            self.held.pieces = self.sessions[0].pieces
        self.leader = None
        return True

    def _within_room(self, settings: DecodingConfig) -> DecodingConfig:
        """Near a context window, write single words, so that nothing that fits is given up."""
        room = min(s.room for s in self.sessions)
        if room < 1:
            raise OutOfRoom
        if room < settings.max_words * (settings.max_word_tokens + 3):
            return settings.model_copy(update={"max_words": 1})
        return settings

    def _settle(self) -> DecodingConfig:
        """Where all members are one and the same there is nothing to fuse: write greedily, as it would alone."""
        same = len({s.signature for s in self.sessions}) == 1
        if same and self.settings.temperature == 0:
            return self.settings.model_copy(update={"branches": 1})
        return self.settings

    # ---- service levels

    async def _serve(self, governor: Governor) -> DecodingConfig:
        """The settings that the next round can afford, with everyone it needs at the end of the ledger."""
        words = sum(r.words for r in self.trace.rounds)
        forwards = sum(s.usage().forward_passes for s in self.sessions)
        plan = governor.plan(Progress(self.tokens, words, forwards))
        if plan is None:
            raise OutOfRoom
        if plan.single:
            if not self.plan.single or self.leader is None:
                self.leader = self._fastest()
            await self.sessions[self.leader].sync()
        elif plan.settings.gate == "never":
            await together(s.sync() for s in self.sessions)
        self.plan = plan
        return plan.settings

    async def _fuse_or_retry(self, index: int, settings: DecodingConfig) -> Round:
        """A fused round; with the request's own branches where those it can afford are of no use."""
        if not self.plan.single:
            try:
                return await self._fuse(index, settings)
            except UnwritableError:
                if self.plan.report is None:
                    raise
        if self.plan.retry is None:
            raise OutOfRoom
        return await self._fuse(index, self._within_room(self.plan.retry))

    def _fastest(self) -> int:
        """Of the members with a vote the fastest; among those about as fast the one with the greatest weight."""
        voting = [k for k, v in enumerate(self.voices) if v.weight > 0]
        least = min(self.sessions[k].pace for k in voting)
        fast = [k for k in voting if self.sessions[k].pace <= 1.1 * least]
        return max(fast, key=lambda k: self.voices[k].weight)

    # ---- a round without a choice

    def _forced(self, index: int) -> Round | None:
        """The whole words that the grammar forces here, without asking anyone; None if there are none."""
        candidate = self.held.forced() if self.held else None
        if candidate is None or not self._is_possible(candidate):
            return None
        return self._unasked(index, candidate)

    def _unasked(self, index: int, candidate: Candidate) -> Round:
        self._words = candidate.words
        return Round(
            index=index,
            text=_readable(candidate.data),
            words=len(candidate.words),
            end=candidate.end,
            fused=False,
            candidates=(self._traced(candidate, ()),),
            winner=0,
            confidence=dict.fromkeys((v.name for v in self.voices), None),
            forced=True,
        )

    def _last(self, index: int) -> Round:
        """A round that ends what is open, for another would leave no room for it."""
        if self.held is None or self.held.ending is None:
            raise RuntimeError("there is nothing to end")
        self._cut = True
        return self._unasked(index, self.held.ending)

    # ---- a round with a leader

    async def _lead(self, index: int, settings: DecodingConfig) -> Round | None:
        """If some member is certain, its certain words; the others follow now or when they are needed."""
        confidences = await self._gate(settings)
        if self.leader is None:
            return None
        leader = self.voices[self.leader]
        candidate = await leader.session.lead(settings)
        if not self._is_possible(candidate):
            if self.plan.single and self.plan.retry is None:
                raise OutOfRoom
            await together(s.sync() for s in self.sessions)
            return None
        self._words = candidate.words
        return Round(
            index=index,
            text=_readable(candidate.data),
            words=len(candidate.words),
            end=candidate.end,
            fused=False,
            candidates=(self._traced(candidate, (leader.name,)),),
            winner=0,
            confidence=confidences,
            leader=leader.name,
        )

    async def _gate(self, settings: DecodingConfig) -> dict[str, float | None]:
        """Choose the leader: the most confident of the certain members, or None."""
        if settings.catch_up == "lazy" and self.leader is not None:
            mine = self.sessions[self.leader].confidence(settings.confidence)
            if mine >= settings.threshold:
                return {v.name: mine if i == self.leader else None for i, v in enumerate(self.voices)}
        await together(s.sync() for s in self.sessions)
        all_ = [s.confidence(settings.confidence) for s in self.sessions]
        best = max(range(len(all_)), key=all_.__getitem__)
        self.leader = best if all_[best] >= settings.threshold else None
        return {v.name: c for v, c in zip(self.voices, all_, strict=True)}

    # ---- a fused round

    async def _fuse(self, index: int, settings: DecodingConfig) -> Round:
        """Everyone proposes, everyone scores, the best candidate wins."""
        confidences = [s.confidence(settings.confidence) for s in self.sessions]
        within = " within the grammar" if self.held else ""
        weights = self.weights.now
        voices = [replace(v, weight=w) for v, w in zip(self.voices, weights, strict=True)]
        proposing = Proposing(voices, self.rules, self._is_possible, lambda who: self._random(index, who), within)
        proposals = await proposing.ask(settings)
        candidates, scores = proposals.candidates, proposals.scores
        if len(candidates) == 1 and not scores:
            only = candidates[0]
            decision = Decision(0, len(only.words), only.end, ())
        else:
            scores = scores or await together(s.score(candidates, settings) for s in self.sessions)
            random = self._random(index, "commit")
            decision = fuse(candidates, scores, weights, confidences, self.rules, random)
            self.weights.note(scores, decision.index)
        winner = candidates[decision.index]
        self._words = winner.words[: decision.words]
        return Round(
            index=index,
            text=_readable(b"".join(self._words)),
            words=decision.words,
            end=decision.end,
            fused=bool(scores),
            candidates=tuple(
                self._traced(
                    candidate,
                    proposals.proposers[c],
                    [row[c] if k not in decision.abstained else None for k, row in enumerate(scores)],
                    decision.scores[c] if scores else None,
                )
                for c, candidate in enumerate(candidates)
            ),
            winner=decision.index,
            confidence={v.name: c for v, c in zip(self.voices, confidences, strict=True)},
            abstained=tuple(self.voices[k].name for k in decision.abstained),
            weights=tuple(weights) if settings.adaptive_weights else (),
        )

    def _is_possible(self, candidate: Candidate) -> bool:
        """Whether every member has tokens for it, and the grammar, if there is one, allows it."""
        if not candidate.words and not candidate.end:
            return False
        if self.held and not self.held.allows(candidate):
            return False
        return all(s.can_write(candidate.data) for s in self.sessions)

    # ---- both

    async def _commit(self, round_: Round, settings: DecodingConfig) -> None:
        """Put the round's words on the ledger; behind a lazy leader the others only take note of them."""
        if self.held:
            self.held.commit(self._words)
        leader = round_.leader
        if round_.forced and settings.gate == "any_certain" and self.leader is not None:
            leader = self.voices[self.leader].name
        following = []
        for voice in self.voices:
            if leader in (None, voice.name) or settings.catch_up == "eager":
                following.append(voice.session)
            else:
                voice.session.defer(self._words)
        await together(s.commit(self._words) for s in following)

    def _append(self, round_: Round) -> FinishReason | None:
        """Add the round's words to the text, within ``max_tokens``; whether and how the text ends."""
        pieces = self.sessions[0].pieces(self._words)
        room = self.settings.max_tokens - self.tokens
        self.tokens += min(len(pieces), room)
        released, stopped = self.text.add(b"".join(pieces[:room]))
        reason: FinishReason | None = None
        if stopped:
            reason = "stop"
        elif len(pieces) > room:
            reason = "length"
        elif round_.end:
            reason = "length" if self._cut else "stop"
        elif len(pieces) == room:
            reason = "length"
        if released:
            self.emit(released, round_)
        return reason

    def _finish(self, reason: FinishReason) -> Written:
        held = self.text.flush()
        if held:
            self.emit(held, self.trace.rounds[-1])
        return Written(self.text.released, reason, self.tokens)

    def _random(self, index: int, who: str) -> Random:
        return Random(f"{self.trace.seed}/{index}/{who}")

    def _traced(
        self,
        candidate: Candidate,
        proposers: tuple[str, ...],
        scores: Sequence[Score | None] = (),
        fused: float | None = None,
    ) -> CandidateTrace:
        shown = {v.name: s.total if s else None for v, s in zip(self.voices, scores, strict=False)}
        return CandidateTrace(_readable(candidate.data), candidate.end, proposers, shown, fused)


def _readable(data: bytes) -> str:
    return data.decode("utf-8", "replace")
