"""An ensemble as a model of lm-eval: text until a stop string, and log-likelihoods of given texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from adafuse_engine import (
    Completion,
    ContextWindowError,
    DecodingConfig,
    Engine,
    EngineConfig,
    InvalidArgumentError,
    TextScore,
    read_config,
)
from adafuse_integrations.lm_eval.journal import Answer, Journal, answer_of

__all__ = ["AdaFuseLM"]

_IGNORED = ("do_sample", "top_p", "top_k", "num_beams")
"""What tasks say to have greedy search; it is what an ensemble does anyway."""


@register_model("adafuse")
class AdaFuseLM(LM):
    """An ensemble in lm-eval.

    Parameters
    ----------
    models
        Model names joined by ``+``, or a list of names and `adafuse_engine.MemberConfig`.
    weights
        Their weights, joined by ``+``, or a list; equal by default.
    engine
        A ready engine, in place of ``models``.
    batch_size
        Requests that are given to the engine at once.
    mix
        Also that of likelihoods: ``arithmetic``, the default here, or ``geometric``.
    journal
        A file that answers are written to, and taken from when the same is asked again.
    config
        A configuration file, in place of ``models``.
    max_length, device, **settings
        The context window, for truncation from the left; where the members go; and any field of
        `adafuse_engine.DecodingConfig`.
    """

    def __init__(
        self,
        models: str | Sequence[Any] = (),
        weights: str | float | Sequence[float] | None = None,
        engine: Engine | None = None,
        config: str | Path | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        journal: str | Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        names = [m for m in models.split("+") if m] if isinstance(models, str) else list(models)
        if sum((engine is not None, bool(names), config is not None)) != 1:
            raise InvalidArgumentError("give lm-eval one of models=NAME+NAME, config=FILE and a ready engine")
        DecodingConfig().override(**settings)
        self._mix = settings.get("mix", "arithmetic")
        if config is not None:
            # Its own settings: a shared engine may have been made with others.
            told = read_config(config)
            engine, settings = Engine.shared(told), told.decoding.override(**settings).model_dump()
        if engine is None:
            parts: list[dict[str, Any]] = [m if isinstance(m, dict) else _as_dict(m) for m in names]
            for part, weight in zip(parts, _weights(weights, len(parts)), strict=True):
                part.setdefault("weight", weight)
                if device and device != "cpu":
                    part.setdefault("device", device)
            engine = Engine.shared(EngineConfig(members=tuple(parts)))  # type: ignore[arg-type]
        self.engine = engine
        self.settings = settings
        self.max_length = max_length or engine.context_window
        # "auto" asks a model to find out; here requests share forwards as far as they can anyway.
        self.batch_size = int(batch_size) if str(batch_size).isdigit() else 8
        self.journal = Journal(Path(journal) if journal else None)
        self.answers: list[Answer] = []
        """What was written so far, in the order of the requests."""

    # ---- writing

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to one of its stop strings."""
        texts: list[str] = []
        for group in self._groups(requests, "generate_until", disable_tqdm):
            for options, members in _by_options(group):
                for request, answer in zip(members, self._answers(members, options), strict=True):
                    self.answers.append(answer)
                    self.cache_hook.add_partial("generate_until", request.args, answer.text)
                    texts.append(answer.text)
        return texts

    def _answers(self, requests: Sequence[Instance], options: dict[str, Any]) -> list[Answer]:
        """From the journal, or else written now."""
        prompts = [str(request.args[0]) for request in requests]
        # What another ensemble, or other settings, wrote into the same journal is no answer of this one.
        asked = {**options, "by": self.get_model_info()}
        missing = [prompt for prompt in prompts if self.journal.find(prompt, asked) is None]
        if missing:
            for prompt, answer in zip(missing, self.write(missing, **options), strict=True):
                self.journal.add(prompt, asked, answer)
        found = [self.journal.find(prompt, asked) for prompt in prompts]
        return [answer for answer in found if answer is not None]

    def write(self, prompts: Sequence[str], **options: Any) -> list[Answer]:
        """The ensemble's answers, prompts cut from the left where they are too long."""
        start = perf_counter()
        done = self._complete(self.engine, prompts, **{**self.settings, **options})
        seconds = (perf_counter() - start) / len(prompts)
        return [answer_of(completion, seconds) for completion in done]

    def _complete(self, engine: Engine, prompts: Sequence[str], **options: Any) -> list[Completion]:
        settings = {"max_tokens": 256, **options}
        return engine.generate_batch([self._fitting(p, settings["max_tokens"]) for p in prompts], **settings)

    def _fitting(self, prompt: str, room: int) -> str:
        while (over := self.engine.count_tokens(prompt) + room + 1 - self.max_length) > 0 and prompt:
            # Tokens of the first member are but a measure: about three characters each.
            prompt = prompt[max(1, 3 * over) :]
        return prompt

    # ---- likelihoods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, in nats, and whether the ensemble would write it."""
        results: list[tuple[float, bool]] = []
        for group in self._groups(requests, "loglikelihood", disable_tqdm):
            pairs = [_moved_space(*request.args) for request in group]
            totals = [self._total(score) for score in self.engine.score_batch(pairs, **self.settings)]
            written = self._written(pairs)
            for request, (context, text), total in zip(group, pairs, totals, strict=True):
                result = (total, written[context].startswith(text) if context else False)
                self.cache_hook.add_partial("loglikelihood", request.args, result)
                results.append(result)
        return results

    def _written(self, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
        """What the ensemble writes after each context, as far as the longest text asked about there."""
        longest: dict[str, str] = {}
        for context, text in pairs:
            if context and len(text) > len(longest.get(context, "")):
                longest[context] = text
        written = {}
        for context, text in longest.items():
            # Words may be spelled in more tokens than the text in one piece is.
            limit = self.engine.count_tokens(text) + 8
            [done] = self._complete(self.engine, [context], **{**self.settings, "max_tokens": limit})
            written[context] = done.text
        return written

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text; one that is too long is read in windows, each after its neighbour."""
        results: list[float] = []
        for group in self._groups(requests, "loglikelihood_rolling", disable_tqdm):
            for request in group:
                total = self._rolling(request.args[0])
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
                results.append(total)
        return results

    def _rolling(self, text: str) -> float:
        total, before, size = 0.0, "", len(text)
        while text:
            piece = text[:size]
            try:
                score = self.engine.score(before, piece, **self.settings)
            except ContextWindowError:
                if size < 2:
                    raise
                # With what came before it may take half of the window.
                size //= 2
                before = before[-size:]
                continue
            total += self._total(score)
            before, text = (before + piece)[-size:], text[size:]
        return total

    def _total(self, score: TextScore) -> float:
        return score.total(self._mix)

    # ---- both

    def _groups(self, requests: list[Instance], what: str, quiet: bool) -> Iterator[list[Instance]]:
        from tqdm import tqdm

        with tqdm(total=len(requests), desc=f"{self.engine.model_name}: {what}", disable=quiet) as bar:
            for at in range(0, len(requests), self.batch_size):
                group = requests[at : at + self.batch_size]
                yield group
                bar.update(len(group))

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's request cache: prompts do not depend on a tokenizer here."""
        return self.engine.model_name

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes down about the model."""
        return {"model": self.engine.model_name, "weights": list(self.engine.weights), "settings": self.settings}


def _as_dict(member: Any) -> dict[str, Any]:
    return {"model": member} if isinstance(member, str) else dict(member.model_dump(exclude_unset=True))


def _weights(given: str | float | Sequence[float] | None, members: int) -> list[float]:
    if given is None:
        return [1.0] * members
    weights = [float(w) for w in str(given).split("+")] if isinstance(given, str | float | int) else list(given)
    if len(weights) != members:
        raise InvalidArgumentError(f"{len(weights)} weights for {members} members")
    return weights


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A task's generation arguments as settings of the engine."""
    options = {k: v for k, v in arguments.items() if k not in _IGNORED}
    until = options.pop("until", None) or []
    options["stop"] = tuple(s for s in ([until] if isinstance(until, str) else until) if s)
    for name in ("max_gen_toks", "max_new_tokens", "max_length"):
        if name in options:
            options["max_tokens"] = int(options.pop(name))
    # A task that samples says so by a temperature; it is passed on.
    return options


def _by_options(group: Sequence[Instance]) -> Iterator[tuple[dict[str, Any], list[Instance]]]:
    """Neighbours that are written with the same options, in order."""
    held: list[Instance] = []
    for request in group:
        if held and request.args[1] != held[-1].args[1]:
            yield _options(held[-1].args[1]), held
            held = []
        held.append(request)
    if held:
        yield _options(held[-1].args[1]), held


def _moved_space(context: str, text: str) -> tuple[str, str]:
    """White space at the end of a context belongs to the word that follows."""
    cut = len(context.rstrip())
    return (context[:cut], context[cut:] + text) if cut else (context, text)
