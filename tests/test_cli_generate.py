from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from adafuse_engine import Engine, EngineConfig
from adafuse_engine.cli import generate as module
from adafuse_engine.cli.show import WordPrinter, confidence_colour, trace_lines, usage_line
from adafuse_engine.testing import ScriptedMember

ANSWER = " The first boat\n\tleaves at 06:40 \N{FERRY}."


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configurations that the command made engines from; members are scripted."""
    configs: list[EngineConfig] = []

    def make(config: EngineConfig) -> Engine:
        configs.append(config)
        members = [ScriptedMember(m.label, ANSWER, confidence=0.3) for m in config.members]
        return Engine(members=members, weights=[m.weight for m in config.members], decoding=config.decoding)

    monkeypatch.setattr(module, "Engine", make)
    return configs


@pytest.fixture
def run() -> Callable[..., Any]:
    app = typer.Typer()
    app.command()(module.generate)

    def run(*args: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, list(args), input=stdin)

    return run


def test_answer_goes_to_a_pipe_unchanged_and_uncoloured(made: list[EngineConfig], run: Any) -> None:
    result = run("When?")
    assert result.exit_code == 0
    assert result.stdout == ANSWER + "\n"
    assert result.stderr == ""


def test_default_members_are_the_two_bundled_models(made: list[EngineConfig], run: Any) -> None:
    run("When?")
    assert [m.model for m in made[0].members] == list(module.DEFAULT_MODELS)


def test_options_reach_the_engine(made: list[EngineConfig], run: Any) -> None:
    result = run(
        *("When?", "--model", "a", "--model", "b", "--weight", "1", "--weight", "3", "--preset", "paper"),
        *("--threshold", "0.5", "--max-tokens", "7", "--stop", r"\n\n", "--stop", "END"),
        *("--temperature", "0.2", "--seed", "11"),
    )
    assert result.exit_code == 0
    config = made[0]
    assert [(m.model, m.weight) for m in config.members] == [("a", 1.0), ("b", 3.0)]
    decoding = config.decoding
    assert (decoding.preset, decoding.fusion, decoding.threshold) == ("paper", "mean_nll", 0.5)
    assert (decoding.max_tokens, decoding.stop) == (7, ("\n\n", "END"))
    assert (decoding.temperature, decoding.seed) == (0.2, 11)


def test_json_is_the_only_thing_on_stdout(made: list[EngineConfig], run: Any) -> None:
    result = run("When?", "--json", "--model", "a", "--model", "b")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["text"] == ANSWER
    assert document["finish_reason"] == "stop"
    assert [m["name"] for m in document["usage"]["members"]] == ["a", "b"]
    assert document["trace"]["rounds"]


def test_dash_reads_the_prompt_from_stdin_without_its_last_newline(
    made: list[EngineConfig], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    plain = Engine.stream
    monkeypatch.setattr(Engine, "stream", lambda self, prompt: prompts.append(prompt) or plain(self, prompt))
    result = run("-", stdin="Question: when?\n\nAnswer:\n")
    assert result.exit_code == 0
    assert prompts == ["Question: when?\n\nAnswer:"]


def test_trace_names_the_members_and_their_candidates(made: list[EngineConfig], run: Any) -> None:
    result = run("When?", "--trace", "--model", "a", "--model", "b")
    assert "A = a (weight 0.50), B = b (weight 0.50)" in result.stdout
    assert "prompt +" in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["When?", "--model", "a", "--weight", "1", "--weight", "2"], "2 weights for 1 models"),
        (["When?", "--model", "a", "--model", "a"], "two members are called 'a'"),
        (["When?", "--model", "a", "--threshold", "2"], "threshold"),
        (["When?", "--model", "a", "--preset", "papre"], "preset"),
        (["", "--model", "a"], "prompt"),
    ],
)
def test_a_mistake_is_told_on_stderr_without_a_traceback(
    made: list[EngineConfig], run: Any, args: list[str], said: str
) -> None:
    result = run(*args)
    assert result.exit_code == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.strip() == ""


def test_words_are_coloured_by_confidence() -> None:
    stream = io.StringIO()
    printer = WordPrinter(stream, colour=True)
    for confidence in (0.9, 0.5, 0.1):
        printer.write(" word", confidence)
    assert stream.getvalue() == "\x1b[32m word\x1b[0m\x1b[33m word\x1b[0m\x1b[31m word\x1b[0m"
    assert [confidence_colour(c) for c in (0.7, 0.4, 0.0)] == ["green", "yellow", "red"]


def test_escape_sequences_of_a_model_do_not_reach_a_terminal() -> None:
    stream = io.StringIO()
    WordPrinter(stream, colour=True).write("a\x1b[2Jb\n\tc", 0.9)
    assert "\x1b[2J" not in stream.getvalue()
    assert "\n\tc" in stream.getvalue()


def test_no_colour_is_written_to_what_is_no_terminal() -> None:
    stream = io.StringIO()
    WordPrinter(stream).write(" a\x1bb ", 0.1)
    assert stream.getvalue() == " a\x1bb "


def test_trace_has_one_line_per_fused_round_with_proposers_and_scores() -> None:
    def candidate(text: str, end: bool, who: list[str], a: float | None, b: float, score: float) -> dict[str, Any]:
        return {"text": text, "end": end, "proposers": who, "scores": {"a": a, "b": b}, "score": score}

    rounds = [
        {
            "index": 0,
            "text": " Agnes",
            "end": False,
            "fused": True,
            "winner": 1,
            "candidates": [
                candidate(" Duncan", False, "a", -1.0, -4.0, -2.5),
                candidate(" Agnes", False, "ab", -1.5, -0.25, -0.9),
                candidate("", True, "b", None, -3.0, -3.0),
            ],
        },
        {"index": 1, "text": " Rolland", "end": True, "fused": False, "winner": 0, "candidates": []},
    ]
    trace = {"members": ["a", "b"], "weights": [0.5, 0.5], "rounds": rounds}
    lines = list(trace_lines(trace))
    assert lines[0].startswith("1 of 2 rounds fused.")
    assert lines[2].split("<-")[1].strip() == (
        "A+B ' Agnes' (-1.50 -0.25) | A ' Duncan' (-1.00 -4.00) | B <end> (- -3.00)"
    )
    assert len(lines) == 3
    assert list(trace_lines(trace, most=1))[2].endswith("| 2 more")


def test_usage_tells_tokens_and_every_members_work() -> None:
    member = {"name": "a", "prompt_tokens": 9, "tokens_processed": 14, "forward_passes": 6, "seconds": 0.25}
    line = usage_line({"prompt_tokens": 9, "completion_tokens": 4, "members": [member]})
    assert line == "9 prompt + 4 completion tokens; a: 14 tokens in 6 forwards, 0.2 s"
