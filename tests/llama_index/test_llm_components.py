"""The LLM inside LlamaIndex: metadata, prompt helper, query engines, chat engines, copies and dumps."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator

import llama_index.core
import pytest
from llama_index.core import Document, MockEmbedding, PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter

from adafuse_engine import EngineConfig, InvalidArgumentError, MemberConfig, UnknownArgumentError
from adafuse_integrations.llama_index import AdaFuseLLM
from tests.support.scripted import Make, script_loading

FACTS = [
    "The harbour ferry leaves at nine\n\nand at noon.",
    "灯塔建于1890年。",
    "Tickets cost\t4 crowns.",
]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    return script_loading(monkeypatch)


@pytest.fixture
def settings() -> Iterator[type[Settings]]:
    before = llama_index.core.global_tokenizer
    yield Settings
    llama_index.core.global_tokenizer = before
    Settings._llm = Settings._prompt_helper = None


def test_metadata_is_true(make_engine: Make) -> None:
    engine, *_ = make_engine(context_window=777)
    metadata = AdaFuseLLM(engine=engine, max_tokens=33).metadata
    assert metadata.context_window == 777
    assert metadata.num_output == 33
    assert metadata.model_name == "a+b"
    assert not metadata.is_chat_model
    assert metadata.is_function_calling_model
    assert AdaFuseLLM(engine=engine, is_chat_model=True).metadata.is_chat_model


def test_prompt_helper_packs_texts_to_what_fits(make_engine: Make) -> None:
    engine, a, _ = make_engine(context_window=120)
    llm = AdaFuseLLM(engine=engine, max_tokens=20)
    helper = PromptHelper.from_llm_metadata(llm.metadata, tokenizer=llm.tokenizer)
    template = PromptTemplate("Context: {context_str}\nQ: why?\nA:")
    packed = helper.repack(template, ["some words of context"] * 60, llm=llm)
    assert len(packed) > 1
    for text in packed:
        llm.complete(template.format(context_str=text))
    assert max(len(a.tokenize(prompt)) for prompt in a.prompts) <= 100


@pytest.mark.parametrize("is_chat_model", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_query_engine_answers_from_the_documents(
    make_engine: Make, settings: type[Settings], is_chat_model: bool, streaming: bool
) -> None:
    engine, a, _ = make_engine(" At nine.\n\n\t(see the 灯塔)")
    llm = AdaFuseLLM(engine=engine, is_chat_model=is_chat_model)
    settings.tokenizer = llm.tokenizer
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in FACTS],
        embed_model=MockEmbedding(embed_dim=4),
        transformations=[SentenceSplitter()],
    )
    response = index.as_query_engine(llm=llm, similarity_top_k=3, streaming=streaming).query("When?")
    text = "".join(response.response_gen) if streaming else response.response
    assert text == " At nine.\n\n\t(see the 灯塔)"
    [prompt] = a.prompts
    assert all(fact in prompt for fact in FACTS)
    assert prompt.count("When?") == 1
    assert prompt.startswith("system:") == is_chat_model


async def test_async_query_engine_answers(make_engine: Make, settings: type[Settings]) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine)
    settings.tokenizer = llm.tokenizer
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in FACTS], embed_model=MockEmbedding(embed_dim=4)
    )
    response = await index.as_query_engine(llm=llm, similarity_top_k=3).aquery("When?")
    assert str(response) == " Paris is the capital."
    assert len(a.prompts) == 1


def test_chat_engine_keeps_the_history(make_engine: Make, settings: type[Settings]) -> None:
    engine, a, _ = make_engine()
    llm = AdaFuseLLM(engine=engine, is_chat_model=True)
    memory = ChatMemoryBuffer.from_defaults(llm=llm, tokenizer_fn=llm.tokenizer)
    chat = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
    assert chat.chat("One?").response == " Paris is the capital."
    assert "".join(chat.stream_chat("Two?").response_gen) == " Paris is the capital."
    assert a.prompts[1] == "user: One?\nassistant:  Paris is the capital.\nuser: Two?\nassistant:"


def test_tokenizer_serves_as_the_global_one(make_engine: Make, settings: type[Settings]) -> None:
    engine, *_ = make_engine()
    settings.tokenizer = AdaFuseLLM(engine=engine).tokenizer
    assert settings.tokenizer("Some words, 你好") == engine.tokenize("Some words, 你好")


# ---- construction


def test_models_are_loaded_at_first_use_and_once(loaded: list[EngineConfig]) -> None:
    first = AdaFuseLLM(models=["org/one", "org/two"], threshold=0.5)
    second = AdaFuseLLM(models=["org/one", MemberConfig(model="org/two")])
    assert first.to_payload()["model_name"] == "one+two"
    assert loaded == []
    assert first.complete("Q:").text == second.complete("Q:").text
    assert first.metadata.context_window == 4096
    assert len(loaded) == 1


async def test_async_calls_load_off_the_event_loop(loaded: list[EngineConfig]) -> None:
    llm = AdaFuseLLM(models=["org/one"])
    assert (await llm.acomplete("Q:")).text == " Paris is the capital."
    assert [r async for r in await llm.astream_complete("Q:")]
    assert len(loaded) == 1


def test_one_engine_serves_both_frameworks(loaded: list[EngineConfig]) -> None:
    from adafuse_integrations.langchain import AdaFuseLLM as LangChainLLM

    models = ["org/one", "org/two"]
    assert AdaFuseLLM(models=models).complete("Q:").text == LangChainLLM(models=models).invoke("Q:")
    assert len(loaded) == 1


def test_wrong_construction_is_refused_at_once() -> None:
    with pytest.raises(UnknownArgumentError, match="did you mean 'system_prompt'"):
        AdaFuseLLM(models=["m"], system_promt="x")
    with pytest.raises(UnknownArgumentError, match="did you mean 'threshold'"):
        AdaFuseLLM(models=["m"], treshold=0.5)
    with pytest.raises(InvalidArgumentError, match="threshold"):
        AdaFuseLLM(models=["m"], threshold=7)
    with pytest.raises(InvalidArgumentError, match="engine="):
        AdaFuseLLM()


def test_dump_and_repr_hold_no_engine_and_make_the_llm_again(make_engine: Make, loaded: list[EngineConfig]) -> None:
    engine, *_ = make_engine()
    ready = AdaFuseLLM(engine=engine, threshold=0.5)
    assert "Engine(" not in repr(ready) + ready.to_json()
    llm = AdaFuseLLM(models=["org/one", MemberConfig(model="org/two", weight=2.0)], fusion="vote", stop=["x"])
    assert AdaFuseLLM.from_json(llm.to_json()).to_payload() == llm.to_payload()
    assert json.loads(llm.to_json())["class_name"] == "AdaFuseLLM"
    assert "engine" not in AdaFuseLLM.model_json_schema()["properties"]


def test_copies_share_the_engine(make_engine: Make) -> None:
    engine, *_ = make_engine()
    llm = AdaFuseLLM(engine=engine, max_tokens=2)
    for other in (copy.copy(llm), copy.deepcopy(llm)):
        assert other.engine is engine
        assert other.complete("Q:").text == " Paris"


def test_llm_made_from_models_can_be_pickled(loaded: list[EngineConfig]) -> None:
    llm = AdaFuseLLM(models=["org/one"], max_tokens=2, system_prompt="S", fusion="vote")
    other = pickle.loads(pickle.dumps(llm))
    assert other.to_payload() == llm.to_payload()
    assert other.complete("Q:").text == " Paris"
