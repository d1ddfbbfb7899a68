"""One event pair and one count per call, whichever method; closing frees the engine, whoever watches."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler

from adafuse_engine import MemberError
from adafuse_integrations.llama_index import AdaFuseLLM
from tests.support.scripted import ENDLESS, NO_LIMIT, Make, await_for, wait_for

LONG = " word and another one" * 40
CHAT = [ChatMessage(role="user", content="Q: why?")]


class Events(BaseEventHandler):
    seen: list[Any]

    @classmethod
    def class_name(cls) -> str:
        return "Events"

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(event)

    @property
    def counts(self) -> Counter[str]:
        return Counter(type(event).__name__ for event in self.seen)


@pytest.fixture
def events() -> Iterator[Events]:
    dispatcher, events = get_dispatcher(), Events(seen=[])
    dispatcher.add_event_handler(events)
    yield events
    dispatcher.event_handlers.remove(events)


@pytest.fixture
def spans() -> Iterator[SimpleSpanHandler]:
    dispatcher, spans = get_dispatcher(), SimpleSpanHandler()
    dispatcher.add_span_handler(spans)
    yield spans
    dispatcher.span_handlers.remove(spans)


async def call(llm: AdaFuseLLM, method: str) -> None:
    argument = CHAT if "chat" in method else "Q: why?"
    match method:
        case "complete" | "chat":
            await asyncio.to_thread(getattr(llm, method), argument)
        case "acomplete" | "achat":
            await getattr(llm, method)(argument)
        case "stream_complete" | "stream_chat":
            await asyncio.to_thread(lambda: list(getattr(llm, method)(argument)))
        case _:
            async for _ in await getattr(llm, method)(argument):
                pass


METHODS = [f"{a}{stream}{kind}" for kind in ("complete", "chat") for a in ("", "a") for stream in ("", "stream_")]
methods = pytest.mark.parametrize("method", METHODS)


def test_the_eight_methods_are_eight() -> None:
    assert len(set(METHODS)) == 8
    assert all(hasattr(AdaFuseLLM, method) for method in METHODS)


@methods
async def test_each_call_is_one_event_pair(make_engine: Make, events: Events, method: str) -> None:
    engine, *_ = make_engine()
    await call(AdaFuseLLM(engine=engine), method)
    kind = "Chat" if "chat" in method else "Completion"
    counts = events.counts
    progress = counts.pop(f"LLM{kind}InProgressEvent", 0)
    assert counts == {f"LLM{kind}StartEvent": 1, f"LLM{kind}EndEvent": 1}
    assert progress == (len(list(engine.stream("Q: why?"))) if "stream" in method else 0)


@methods
async def test_each_call_is_one_span(make_engine: Make, spans: SimpleSpanHandler, method: str) -> None:
    engine, *_ = make_engine()
    await call(AdaFuseLLM(engine=engine), method)
    assert [s.id_.split("-")[0] for s in spans.completed_spans] == [f"AdaFuseLLM.{method}"]


@methods
async def test_each_call_is_counted_once_by_the_real_tokenizer(make_engine: Make, method: str) -> None:
    engine, *_ = make_engine()
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = AdaFuseLLM(engine=engine)
    counter = TokenCountingHandler(tokenizer=llm.tokenizer)
    llm.callback_manager = CallbackManager([debug, counter])
    await call(llm, method)
    messages = [{"role": "user", "content": "Q: why?"}]
    usage = engine.generate(messages if "chat" in method else "Q: why?").usage
    [count] = counter.llm_token_counts
    assert count.prompt_token_count == usage.prompt_tokens
    assert count.completion_token_count == usage.completion_tokens
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 1


@methods
async def test_failing_call_ends_its_event_with_the_exception(make_engine: Make, method: str) -> None:
    engine, *_ = make_engine(nan_from=4)
    debug = LlamaDebugHandler(print_trace_on_end=False)
    with pytest.raises(MemberError):
        await call(AdaFuseLLM(engine=engine, callback_manager=CallbackManager([debug])), method)
    [[_, end]] = debug.get_event_pairs(CBEventType.LLM)
    assert isinstance(end.payload["exception"], MemberError)


def test_observers_are_told_the_settings_and_no_secret(make_engine: Make, events: Events) -> None:
    engine, *_ = make_engine()
    AdaFuseLLM(engine=engine, threshold=0.25).complete("Q:", max_tokens=5)
    start = events.seen[0]
    assert start.model_dict["model_name"] == "a+b"
    assert start.model_dict["threshold"] == 0.25
    assert start.additional_kwargs == {"max_tokens": 5}
    assert "Engine(" not in str(start.model_dict)


# ---- in time


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
    for response in llm.stream_complete("Q:"):
        assert response.delta or go_on.is_set()
        go_on.set()
    assert response.text == LONG


async def test_text_streams_to_tasks_while_the_answer_is_being_written(make_engine: Make) -> None:
    llm, go_on = gated(make_engine)
    async for response in await llm.astream_chat(CHAT):
        assert response.delta or go_on.is_set()
        go_on.set()
    assert response.message.content == LONG


async def test_async_calls_run_side_by_side_on_a_free_loop(make_engine: Make) -> None:
    llm, go_on = gated(make_engine)
    tasks = [asyncio.create_task(llm.acomplete("Q:")), asyncio.create_task(llm.achat(CHAT))]
    await asyncio.sleep(0)
    go_on.set()
    completion, answer = await asyncio.gather(*tasks)
    assert completion.text == answer.message.content == LONG


# ---- closing and cancelling


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_closing_a_stream_stops_the_engine(make_engine: Make, method: str) -> None:
    engine, a, b = make_engine(**ENDLESS)
    # This handler keeps the exception, and with it the frames that it came through.
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = AdaFuseLLM(engine=engine, max_tokens=NO_LIMIT, callback_manager=CallbackManager([debug]))
    responses = getattr(llm, method)(CHAT if "chat" in method else "Q:")
    next(responses)
    responses.close()
    wait_for(lambda: a.open_sessions == b.open_sessions == 0)
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
    assert llm.complete("Q:", max_tokens=1).text == " word"


@pytest.mark.parametrize("method", ["astream_complete", "astream_chat"])
async def test_closing_an_async_stream_stops_the_engine(make_engine: Make, method: str) -> None:
    engine, a, b = make_engine(**ENDLESS)
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = AdaFuseLLM(engine=engine, max_tokens=NO_LIMIT, callback_manager=CallbackManager([debug]))
    responses = await getattr(llm, method)(CHAT if "chat" in method else "Q:")
    await anext(responses)
    await responses.aclose()
    await await_for(lambda: a.open_sessions == b.open_sessions == 0)
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
    assert (await llm.acomplete("Q:", max_tokens=1)).text == " word"


@pytest.mark.parametrize("method", [m for m in METHODS if m.startswith("a")])
async def test_cancelling_a_task_stops_the_engine(make_engine: Make, method: str) -> None:
    engine, a, b = make_engine(**ENDLESS)
    llm = AdaFuseLLM(engine=engine, max_tokens=NO_LIMIT)
    task = asyncio.create_task(call(llm, method))
    await await_for(lambda: a.forwards > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await await_for(lambda: a.open_sessions == b.open_sessions == 0)
    assert (await llm.acomplete("Q:", max_tokens=1)).text == " word"


def test_stream_that_is_never_read_starts_nothing(make_engine: Make) -> None:
    engine, a, _ = make_engine()
    AdaFuseLLM(engine=engine, max_tokens=NO_LIMIT).stream_complete("Q:").close()
    assert a.prompts == []
