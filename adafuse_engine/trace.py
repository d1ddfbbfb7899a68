"""One record per round: what was proposed, what everyone thought of it, what was committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CandidateTrace", "Failure", "Round", "Trace"]


@dataclass(frozen=True, slots=True)
class CandidateTrace:
    """One candidate of a round.

    ``scores`` maps each member to its log-probability of the candidate in nats (None: not scored, or the
    member abstained); ``score`` is the fused score by which candidates are compared, None where the round
    was decided without scoring.
    """

    text: str
    end: bool
    proposers: tuple[str, ...]
    scores: dict[str, float | None]
    score: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "text": self.text,
            "end": self.end,
            "proposers": list(self.proposers),
            "scores": dict(self.scores),
            "score": self.score,
        }


@dataclass(frozen=True, slots=True)
class Round:
    """One round: ``text`` is what it committed (``words`` of it), ``winner`` indexes ``candidates``.

    ``confidence`` maps members to their confidence at the start of the round (None: not asked, because it
    was still catching up). ``leader`` is the member that wrote alone, if one did. ``abstained`` names the
    members whose scores were not finite. The text may be shorter than the winner's: see ``word_posterior``.
    ``service`` says what was changed to keep a service level: the ``mode`` (``fused``, ``gated``, ``single``),
    the ``threshold``, ``branches`` and ``max_words`` of the round, and ``because`` of which setting; None where
    nothing was. ``forced``: the grammar left no choice, and no member was asked. ``weights``: the members', where
    ``adaptive_weights`` moves them.
    """

    index: int
    text: str
    words: int
    end: bool
    fused: bool
    candidates: tuple[CandidateTrace, ...]
    winner: int
    confidence: dict[str, float | None]
    leader: str | None = None
    abstained: tuple[str, ...] = ()
    service: dict[str, Any] | None = None
    forced: bool = False
    weights: tuple[float, ...] = ()

    @property
    def certainty(self) -> float:
        """The greatest confidence among the winner's proposers, in [0, 1]; 0 if none was asked, 1 if forced."""
        if self.forced:
            return 1.0
        proposers = self.candidates[self.winner].proposers
        return max((self.confidence.get(name) or 0.0 for name in proposers), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "index": self.index,
            "text": self.text,
            "words": self.words,
            "end": self.end,
            "fused": self.fused,
            "candidates": [c.to_dict() for c in self.candidates],
            "winner": self.winner,
            "confidence": dict(self.confidence),
            "leader": self.leader,
            "abstained": list(self.abstained),
            "service": None if self.service is None else dict(self.service),
            "forced": self.forced,
            "weights": list(self.weights),
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A member that the others went on without: from which round on, and why."""

    round: int
    member: str
    error: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"round": self.round, "member": self.member, "error": self.error}


@dataclass(slots=True)
class Trace:
    """All rounds of one request, with the members, their normalised weights, the seed and the settings.

    ``failures``: members that were lost on the way (see ``on_member_failure``).
    """

    members: tuple[str, ...]
    weights: tuple[float, ...]
    seed: int
    settings: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def fused_rounds(self) -> int:
        """Rounds that members' scores decided."""
        return sum(r.fused for r in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "members": list(self.members),
            "weights": list(self.weights),
            "seed": self.seed,
            "settings": self.settings,
            "rounds": [r.to_dict() for r in self.rounds],
            "failures": [f.to_dict() for f in self.failures],
        }
