"""Callbacks, usage and traces: once, in time, and the same on every road; closing frees the engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import GenerationChunk, LLMResult

from adafuse_integrations.langchain import AdaFuseLLM
from tests.support.scripted import ENDLESS, HARD_TEXT, NO_LIMIT, Make, await_for, wait_for

LONG = " word and another one" * 40


class Recorder(BaseCallbackHandler):
    """Keeps what it is told, exceptions with their tracebacks included."""

    def __init__(self) -> None:
        self.prompts: dict[UUID, str] = {}
        self.tokens: list[tuple[UUID, str]] = []
        self.chunks: list[GenerationChunk] = []
        self.results: dict[UUID, LLMResult] = {}
        self.errors: list[BaseException] = []
        self.params: list[dict[str, Any]] = []
        self.metadata: list[dict[str, Any]] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], *, run_id: UUID, **kwargs: Any) -> None:
        [self.prompts[run_id]] = prompts
        self.params.append(kwargs["invocation_params"])
        self.metadata.append(kwargs["metadata"])

    def on_llm_new_token(self, token: str, *, chunk: Any, run_id: UUID, **kwargs: Any) -> None:
        self.tokens.append((run_id, token))
        self.chunks.append(chunk)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        assert run_id not in self.results
        self.results[run_id] = response

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)

    @property
    def info(self) -> dict[str, Any]:
        [result] = self.results.values()
        return result.generations[0][0].generation_info or {}


async def call(llm: AdaFuseLLM, road: str, config: Any) -> None:
    match road:
        case "invoke":
            await asyncio.to_thread(llm.invoke, "Q: why?", config)
        case "stream":
            await asyncio.to_thread(lambda: list(llm.stream("Q: why?", config)))
        case "batch":
            await asyncio.to_thread(llm.batch, ["Q: why?"], config)
        case "ainvoke":
            await llm.ainvoke("Q: why?", config)
        case "astream":
            async for _ in llm.astream("Q: why?", config):
                pass
        case "abatch":
            await llm.abatch(["Q: why?"], config)


roads = pytest.mark.parametrize("road", ["invoke", "stream", "batch", "ainvoke", "astream", "abatch"])


@roads
async def test_usage_and_finish_reason_are_the_same_on_every_road(make_engine: Make, road: str) -> None:
    engine, *_ = make_engine(HARD_TEXT)
    llm, recorder = AdaFuseLLM(engine=engine), Recorder()
    await call(llm, road, {"callbacks": [recorder]})
    usage = recorder.info["usage"]
    assert usage["prompt_tokens"] == llm.get_num_tokens("Q: why?")
    assert usage["completion_tokens"] == engine.generate("Q: why?").usage.completion_tokens > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [m["name"] for m in usage["members"]] == ["a", "b"]
    assert recorder.info["finish_reason"] == "stop"
    assert recorder.info["model_name"] == "a+b"


@roads
async def test_trace_is_plain_json_and_tells_every_round(make_engine: Make, road: str) -> None:
    engine, *_ = make_engine(HARD_TEXT)
    recorder = Recorder()
    await call(AdaFuseLLM(engine=engine), road, {"callbacks": [recorder]})
    trace = recorder.info["adafuse_trace"]
    assert json.loads(json.dumps(trace)) == trace
    assert trace["members"] == ["a", "b"]
    assert "".join(r["text"] for r in trace["rounds"]) == HARD_TEXT


def test_llm_output_adds_up_the_tokens_of_all_prompts(make_engine: Make) -> None:
    engine, *_ = make_engine()
    result = AdaFuseLLM(engine=engine).generate(["Q: one?", "Q: one and two?"])
    usages = [g[0].generation_info["usage"] for g in result.generations]
    assert result.llm_output == {
        "model_name": "a+b",
        "token_usage": {
            key: sum(u[key] for u in usages) for key in ("prompt_tokens", "completion_tokens", "total_tokens")
        },
    }


async def test_agenerate_equals_generate(make_engine: Make) -> None:
    engine, *_ = make_engine(lambda prompt: f" answer to {prompt}")
    llm = AdaFuseLLM(engine=engine)
    result = await llm.agenerate(["one", "two"])
    assert [g[0].text for g in result.generations] == [" answer to one", " answer to two"]
    assert result.llm_output == llm.generate(["one", "two"]).llm_output


@pytest.mark.parametrize("road", ["stream", "astream"])
async def test_each_chunk_is_one_token_callback(make_engine: Make, road: str) -> None:
    engine, *_ = make_engine(HARD_TEXT)
    recorder = Recorder()
    await call(AdaFuseLLM(engine=engine), road, {"callbacks": [recorder]})
    assert [t for _, t in recorder.tokens] == [c.text for c in engine.stream("Q: why?")]
    assert len(recorder.tokens) > 5


@pytest.mark.parametrize("road", ["invoke", "batch", "ainvoke", "abatch"])
async def test_answers_in_one_piece_fire_no_token_callback(make_engine: Make, road: str) -> None:
    engine, *_ = make_engine()
    recorder = Recorder()
    await call(AdaFuseLLM(engine=engine), road, {"callbacks": [recorder]})
    assert recorder.tokens == []
    assert len(recorder.prompts) == len(recorder.results) == 1


def test_token_callback_comes_before_its_chunk_is_yielded(make_engine: Make) -> None:
    engine, *_ = make_engine()
    recorder = Recorder()
    for count, piece in enumerate(AdaFuseLLM(engine=engine).stream("Q:", {"callbacks": [recorder]}), start=1):
        assert len(recorder.tokens) == count
        assert recorder.tokens[-1][1] == piece


def gated(make_engine: Make) -> tuple[AdaFuseLLM, threading.Event]:
    """An LLM that stands still in the middle of its answer until the event is set."""
    go_on = threading.Event()

    def wait(forward: int) -> None:
        if forward > 8 and not go_on.wait(20):
            raise TimeoutError("nothing was delivered while the answer was being written")

    engine, *_ = make_engine(LONG, on_forward=wait)
    return AdaFuseLLM(engine=engine, max_words=1), go_on


def test_text_streams_while_the_answer_is_being_written(make_engine: Make) -> None:
    llm, go_on = gated(make_engine)
    pieces: Iterator[str] = llm.stream("Q:")
    first = next(pieces)
    assert first
    assert LONG.startswith(first)
    go_on.set()
    assert first + "".join(pieces) == LONG


async def test_text_streams_to_tasks_while_the_answer_is_being_written(make_engine: Make) -> None:
    llm, go_on = gated(make_engine)
    text = ""
    async for piece in llm.astream("Q:"):
        text += piece
        go_on.set()
    assert text == LONG


def test_chunks_merge_to_the_whole_answer(make_engine: Make) -> None:
    engine, *_ = make_engine(HARD_TEXT)
    recorder = Recorder()
    text = "".join(AdaFuseLLM(engine=engine).stream("Q:", {"callbacks": [recorder]}))
    merged = recorder.chunks[0]
    for chunk in recorder.chunks[1:]:
        merged += chunk
    [[generation]] = recorder.results.popitem()[1].generations
    assert merged.text == generation.text == text
    assert merged.generation_info == generation.generation_info
    assert "".join(c["text"] for c in merged.generation_info["adafuse_chunks"]) == text


def test_usage_and_trace_are_on_the_last_chunk_alone(make_engine: Make) -> None:
    engine, *_ = make_engine()
    recorder = Recorder()
    list(AdaFuseLLM(engine=engine).stream("Q:", {"callbacks": [recorder]}))
    *before, last = [set(chunk.generation_info) for chunk in recorder.chunks]
    assert all(keys == {"adafuse_chunks"} for keys in before)
    assert last >= {"finish_reason", "usage", "model_name", "adafuse_trace"}


def test_each_prompt_of_a_batch_has_a_run_of_its_own(make_engine: Make) -> None:
    engine, *_ = make_engine(lambda prompt: f" answer to {prompt}")
    recorder = Recorder()
    AdaFuseLLM(engine=engine).batch(["one", "two", "three"], {"callbacks": [recorder]})
    texts = {p: recorder.results[run].generations[0][0].text for run, p in recorder.prompts.items()}
    assert texts == {p: f" answer to {p}" for p in ("one", "two", "three")}
    assert all(result.llm_output["token_usage"]["prompt_tokens"] for result in recorder.results.values())


def test_tokens_of_streams_side_by_side_carry_their_own_run(make_engine: Make) -> None:
    engine, *_ = make_engine(lambda prompt: f" answer to {prompt} in some words")
    llm, recorder = AdaFuseLLM(engine=engine), Recorder()
    streams = [llm.stream(p, {"callbacks": [recorder]}) for p in ("one", "two")]
    for _ in zip(*streams, strict=True):
        pass
    for run, prompt in recorder.prompts.items():
        text = "".join(token for r, token in recorder.tokens if r == run)
        assert text == f" answer to {prompt} in some words"


def test_callbacks_and_tracers_are_told_the_settings_of_the_call(make_engine: Make) -> None:
    engine, *_ = make_engine()
    recorder = Recorder()
    AdaFuseLLM(engine=engine, max_tokens=9).invoke(
        "Q:", {"callbacks": [recorder], "metadata": {"mine": 1}}, temperature=0.5, seed=3, stop=["x"]
    )
    [params], [metadata] = recorder.params, recorder.metadata
    assert params["decoding"]["temperature"] == 0.5
    assert params["decoding"]["max_tokens"] == 9
    assert params["stop"] == ["x"]
    assert metadata["mine"] == 1
    assert {key: value for key, value in metadata.items() if key.startswith("ls_")} == {
        "ls_provider": "adafuse",
        "ls_model_type": "llm",
        "ls_model_name": "a+b",
        "ls_temperature": 0.5,
        "ls_max_tokens": 9,
        "ls_stop": ["x"],
    }


# ---- closing and cancelling


def test_closing_a_stream_stops_the_engine(make_engine: Make) -> None:
    engine, a, b = make_engine(**ENDLESS)
    recorder = Recorder()
    pieces = AdaFuseLLM(engine=engine, max_tokens=NO_LIMIT).stream("Q:", {"callbacks": [recorder]})
    next(pieces)
    pieces.close()
    wait_for(lambda: a.open_sessions == b.open_sessions == 0)
    assert AdaFuseLLM(engine=engine, max_tokens=1).invoke("Q:") == " word"
    assert len(recorder.errors) == 1


async def test_closing_an_async_stream_stops_the_engine(make_engine: Make) -> None:
    engine, a, b = make_engine(**ENDLESS)
    recorder = Recorder()
    pieces = AdaFuseLLM(engine=engine, max_tokens=NO_LIMIT).astream("Q:", {"callbacks": [recorder]})
    await anext(pieces)
    await pieces.aclose()
    await await_for(lambda: a.open_sessions == b.open_sessions == 0)
    assert await AdaFuseLLM(engine=engine, max_tokens=1).ainvoke("Q:") == " word"
    assert len(recorder.errors) == 1


@pytest.mark.parametrize("road", ["ainvoke", "astream", "abatch"])
async def test_cancelling_a_task_stops_the_engine(make_engine: Make, road: str) -> None:
    engine, a, b = make_engine(**ENDLESS)
    task = asyncio.create_task(call(AdaFuseLLM(engine=engine, max_tokens=NO_LIMIT), road, {}))
    await await_for(lambda: a.forwards > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await await_for(lambda: a.open_sessions == b.open_sessions == 0)
    assert await AdaFuseLLM(engine=engine, max_tokens=1).ainvoke("Q:") == " word"


async def test_first_failure_of_agenerate_cancels_the_other_prompts(make_engine: Make) -> None:
    engine, a, b = make_engine(**ENDLESS)
    with pytest.raises(ValueError, match="no text"):
        await AdaFuseLLM(engine=engine, max_tokens=NO_LIMIT).agenerate(["Q:", " "])
    await await_for(lambda: a.open_sessions == b.open_sessions == 0)
