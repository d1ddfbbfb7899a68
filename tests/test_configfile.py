"""Configuration files."""

import tomllib

import pytest

from adafuse_engine import (
    DecodingConfig,
    EngineConfig,
    InvalidArgumentError,
    MemberConfig,
    UnknownArgumentError,
    read_config,
    write_config,
)

CONFIG = EngineConfig(
    members=[MemberConfig(model="one/model", weight=3.0, dtype="bfloat16"), "two.gguf"],
    decoding=DecodingConfig(preset="paper", threshold=0.4, stop=["\n"], mix="arithmetic"),
    max_concurrency=3,
)


def test_what_is_written_is_read_back(tmp_path):
    for config in (CONFIG, EngineConfig(members=["one"])):
        write_config(tmp_path / "a.toml", config, about={"made by": "hand"})
        assert read_config(tmp_path / "a.toml") == config


def test_defaults_are_left_out(tmp_path):
    write_config(tmp_path / "a.toml", EngineConfig(members=["one"]))
    assert tomllib.loads((tmp_path / "a.toml").read_text()) == {"members": [{"model": "one"}]}


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("[[members]]\nmodle = 'x'", UnknownArgumentError, "'model'"),
        ("[[members]]\nmodel = 'x'\n[decodng]", UnknownArgumentError, "'decoding'"),
        ("[[members]]\nmodel = 'x'\n[decoding]\nthreshold = 2", InvalidArgumentError, "threshold"),
        ("[decoding]\nthreshold = 0.2", InvalidArgumentError, "no \\[\\[members\\]\\]"),
        ("members = 3", InvalidArgumentError, "no \\[\\[members\\]\\]"),
        ("[[members]]\nmodel = 'x'\n[[decoding]]", InvalidArgumentError, "tables"),
        ("this is no TOML", InvalidArgumentError, "is no TOML"),
    ],
)
def test_mistakes_are_told_with_the_nearest_name(tmp_path, text, error, says):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(error, match=says):
        read_config(path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(InvalidArgumentError, match="No such file"):
        read_config(tmp_path / "none.toml")


def adapters():
    from adafuse_integrations import langchain, llama_index

    return [langchain.AdaFuseLLM, langchain.ChatAdaFuse, llama_index.AdaFuseLLM]


@pytest.mark.parametrize("adapter", adapters(), ids=lambda a: f"{a.__module__.split('.')[1]}.{a.__name__}")
def test_every_adapter_is_made_from_a_file(adapter, tmp_path):
    write_config(tmp_path / "a.toml", CONFIG)
    llm = adapter.from_config(tmp_path / "a.toml", max_tokens=7)
    assert llm._settings() == CONFIG.decoding.override(max_tokens=7)
    assert llm._members() == CONFIG.members
    assert llm.engine_options == {"max_concurrency": 3}
    with pytest.raises(UnknownArgumentError):
        adapter.from_config(tmp_path / "a.toml", treshold=1)
    with pytest.raises(InvalidArgumentError):
        adapter(models=["x"], engine_options={"max_concurrency": 0})
