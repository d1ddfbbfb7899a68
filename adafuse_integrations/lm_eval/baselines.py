"""What a user could do instead of fusing: choose among whole answers, or vote over samples of one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from adafuse_engine import Engine
from adafuse_integrations.lm_eval.journal import Answer, answer_of
from adafuse_integrations.lm_eval.model import AdaFuseLM

__all__ = ["MajorityLM", "RerankLM"]

_BY_TOKEN = {"gate": "never", "max_words": 1, "max_word_tokens": 1, "branches": 8, "word_end_mass": False}
"""Draws token by token, from the most probable ones: one forward a token."""


class RerankLM(AdaFuseLM):
    """Each member writes its own answer; all score all, per byte with its end; the best is taken."""

    def __init__(self, engine: Engine, members: Sequence[Engine], **options: Any) -> None:
        super().__init__(engine=engine, **options)
        self.members = members

    def write(self, prompts: Sequence[str], **options: Any) -> list[Answer]:
        """The answers that the members together find the most probable."""
        start = perf_counter()
        written = [self._complete(engine, prompts, **{**self.settings, **options}) for engine in self.members]
        chosen = []
        for at, prompt in enumerate(prompts):
            texts = [done[at].text for done in written]
            scores = self.engine.score_batch([(prompt, text) for text in texts], end=True)
            bits = [score.bits_per_byte("geometric") for score in scores]
            best = bits.index(min(bits))
            others = [done[at] for k, done in enumerate(written) if k != best]
            chosen.append(answer_of(written[best][at], 0.0, others))
        seconds = (perf_counter() - start) / len(prompts)
        # Scoring is one forward per answer and member, beside the prompt's that it shares with the writing.
        scoring = len(self.members) * len(self.engine.member_names)
        return [Answer(a.text, a.forward_passes + scoring, a.rounds, a.fused, seconds) for a in chosen]


class MajorityLM(AdaFuseLM):
    """One model writes ``samples`` answers; the one that comes most often is taken, the first of them in a tie.

    Wang et al. 2022, with the whole answer, without white space around it and capital letters, as what is voted on.
    """

    def __init__(self, engine: Engine, samples: int = 5, temperature: float = 0.7, **options: Any) -> None:
        super().__init__(engine=engine, **options)
        self.samples = samples
        self.temperature = temperature

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes down about the model."""
        return super().get_model_info() | {"samples": self.samples, "temperature": self.temperature}

    def write(self, prompts: Sequence[str], **options: Any) -> list[Answer]:
        """The answers that most samples agree on."""
        start = perf_counter()
        drawn = []
        for seed in range(self.samples):
            draw = {**_BY_TOKEN, "temperature": self.temperature, "seed": seed}
            drawn.append(self._complete(self.engine, prompts, **{**self.settings, **options, **draw}))
        seconds = (perf_counter() - start) / len(prompts)
        answers = []
        for at in range(len(prompts)):
            all_ = [done[at] for done in drawn]
            [(common, _), *_] = Counter(c.text.strip().lower() for c in all_).most_common(1)
            first = next(k for k, c in enumerate(all_) if c.text.strip().lower() == common)
            answers.append(answer_of(all_[first], seconds, [c for k, c in enumerate(all_) if k != first]))
        return answers
