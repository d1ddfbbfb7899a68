"""An AdaFuse ensemble as a LangChain LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig

from adafuse_engine import Chunk, Completion
from adafuse_integrations._shared import EnsembleFields, astream, stream
from adafuse_integrations.langchain.identity import identities

__all__ = ["AdaFuseLLM"]

_RUN_ARGUMENTS = ("tags", "metadata", "run_name", "run_id")


class AdaFuseLLM(EnsembleFields, BaseLLM):
    """An ensemble of language models as one LangChain LLM: ``AdaFuseLLM(models=[...], threshold=0.7)``.

    Parameters
    ----------
    models
        The members: model names, dicts or `adafuse_engine.MemberConfig`. They are loaded at first use, once
        per process: LLMs and configured copies with the same models share one engine.
    engine
        A ready `adafuse_engine.Engine`, in place of ``models``.
    preset, threshold, max_tokens, temperature, seed, stop
        The usual settings. Every other field of `adafuse_engine.DecodingConfig` may be given as well.

    All settings, ``stop`` included, can also be given to a call or with ``bind``, and then hold for that call
    in place of the configured ones. Unknown arguments raise `adafuse_engine.UnknownArgumentError`.

    ``generation_info`` holds ``finish_reason``, ``usage``, ``model_name`` and ``adafuse_trace``, in a stream
    on the last chunk; the chunks before it hold one item of ``adafuse_chunks`` each: ``text``, ``round``,
    ``confidence`` and ``fused``.

    Answers drawn without a seed (``temperature`` above 0) are not kept in LangChain's global cache, for each
    call must draw anew; a ``cache`` given to this LLM itself keeps them.
    """

    @property
    def _llm_type(self) -> str:
        return "adafuse"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        # Settings stand under one key: LangChain itself writes "stop" beside it.
        return {
            "model_name": self.model_name,
            "members": identities(self._members(), self.engine),
            "decoding": self._settings().model_dump(mode="json"),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        settings = self._settings(stop, **kwargs)
        params = LangSmithParams(
            ls_provider="adafuse",
            ls_model_type="llm",
            ls_model_name=self.model_name,
            ls_temperature=settings.temperature,
            ls_max_tokens=settings.max_tokens,
        )
        if settings.stop:
            params["ls_stop"] = list(settings.stop)
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of the text by the first member's tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._ensemble().tokenize(text)

    # ---- one prompt or several

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self._settings(stop, **kwargs).model_dump()
        return self._result(self._ensemble().generate_batch(prompts, **options))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self._settings(stop, **kwargs).model_dump()
        engine = await self._aensemble()
        tasks = [asyncio.ensure_future(engine.agenerate(prompt, **options)) for prompt in prompts]
        try:
            return self._result(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _result(self, completions: Sequence[Completion]) -> LLMResult:
        usages = [c.usage for c in completions]
        return LLMResult(
            generations=[[Generation(text=c.text, generation_info=self._info(c))] for c in completions],
            llm_output={
                "token_usage": {
                    "prompt_tokens": sum(u.prompt_tokens for u in usages),
                    "completion_tokens": sum(u.completion_tokens for u in usages),
                    "total_tokens": sum(u.total_tokens for u in usages),
                },
                "model_name": self.model_name,
            },
        )

    def _info(self, completion: Completion) -> dict[str, Any]:
        return {
            "finish_reason": completion.finish_reason,
            "usage": completion.usage.to_dict(),
            "model_name": self.model_name,
            "adafuse_trace": completion.trace.to_dict(),
        }

    # ---- streams

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        settings = self._settings(stop, **kwargs)
        with stream(self._ensemble(), prompt, settings) as chunks:
            for chunk in chunks:
                generation = self._chunk(chunk)
                if run_manager is not None:
                    run_manager.on_llm_new_token(generation.text, chunk=generation)
                yield generation

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        settings = self._settings(stop, **kwargs)
        async with astream(await self._aensemble(), prompt, settings) as chunks:
            async for chunk in chunks:
                generation = self._chunk(chunk)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(generation.text, chunk=generation)
                yield generation

    def _chunk(self, chunk: Chunk) -> GenerationChunk:
        # LangChain merges the infos of all chunks by key: lists are appended, but unequal numbers are added
        # or refused. So what each chunk has goes into a list, and the rest stands on the last one alone.
        info: dict[str, Any] = {}
        if chunk.text:
            word = {"text": chunk.text, "round": chunk.round, "confidence": chunk.confidence}
            info["adafuse_chunks"] = [{**word, "fused": chunk.fused}]
        if chunk.completion is not None:
            info.update(self._info(chunk.completion))
        return GenerationChunk(text=chunk.text, generation_info=info)

    # ---- where BaseLLM falls short

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer prompts, with a run of callbacks for each; see `BaseLLM.generate`."""
        run = {name: kwargs.pop(name) for name in _RUN_ARGUMENTS if name in kwargs}
        return super(AdaFuseLLM, self._configured(kwargs)).generate(prompts, stop, callbacks, **run)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer prompts, with a run of callbacks for each; see `BaseLLM.agenerate`."""
        run = {name: kwargs.pop(name) for name in _RUN_ARGUMENTS if name in kwargs}
        return await super(AdaFuseLLM, self._configured(kwargs)).agenerate(prompts, stop, callbacks, **run)

    def _configured(self, options: dict[str, Any]) -> AdaFuseLLM:
        """Itself, or a copy that has a call's options as its own settings.

        LangChain makes the cache's key, and what callbacks are told, from the LLM's settings and leaves a
        call's options out: two calls with different temperatures would share an answer.
        """
        settings = self._settings(**options)
        llm = self._with_settings(settings) if options else self
        if self.cache is None and settings.temperature > 0 and settings.seed is None:
            llm = llm.model_copy(update={"cache": False})
        return llm

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Answer several inputs at once; each has its own run, and fails alone if exceptions are returned."""
        # BaseLLM makes one call of all inputs: one bad prompt spoils it, and tokens are counted on one run.
        return Runnable.batch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """`batch` for async callers."""
        return await Runnable.abatch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)
