"""The benchmark's own parts: prompts, the plain road, and every measure on tiny models. No time is judged."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from adafuse_engine import Engine
from tests.benchmarks import measures, plain, prompts, run
from tests.benchmarks.bench import Bench, Result, Size
from tests.support import tiny

RUN = Path(__file__).parent / "benchmarks" / "run.py"
TINY = Size(
    prompts=1,
    ablated=1,
    repeats=2,
    tokens=8,
    gated=1,
    at_once=2,
    batch_tokens=3,
    passage=20,
    plain_words=2,
    words=3,
    context=40,
    long=40,
    requests=6,
    settled=2,
)


@pytest.fixture(scope="module")
def bench():
    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
        yield Bench(TINY, engine)


@pytest.fixture
def own_prompts(monkeypatch, tmp_path):
    monkeypatch.setattr(prompts, "DATA", tmp_path / "none.jsonl")


def test_without_data_the_prompts_are_our_own(own_prompts):
    assert prompts.short(5)[4].startswith("The lighthouse")
    assert prompts.short(1)[0].endswith("Question: Who built the lighthouse?\nAnswer:")


def test_a_passage_has_about_as_many_tokens_as_asked_for():
    for tokens in (20, 300):
        assert 0.8 * tokens < len(prompts.passage_of(str.split, tokens).split()) <= tokens


def test_the_plain_road_writes_the_engine_s_text_in_whole_rounds(bench):
    options = {"preset": "paper", "max_word_tokens": 4}
    text = bench.engine.generate("The ferry leaves", max_tokens=60, **options).text
    road = plain.walk(bench.members, "The ferry leaves", 2, 60, **options)
    assert text.startswith(road.text)
    assert road.words >= 2
    assert road.rounds >= 1


def test_the_plain_road_computes_again_in_each_round_what_it_knew_in_the_one_before(bench):
    member = bench.members[0]
    ids = member.prompt_ids("The ferry leaves")
    road = plain.PlainMember(member.model.runner.model, member.model.vocabulary, list(ids))
    for _ in range(2):
        road.logprobs([5])
    assert (road.passes, road.asked) == (1, 2)
    road.ids = [*ids, 5]
    road.logprobs([])
    assert (road.passes, road.asked, road.rounds) == (2, 3, 1)


@pytest.mark.parametrize(
    ("ratio", "target", "met"), [(1.2, "<= 1.2", True), (24.9, ">= 25", False), (10.0, "< 10 MB", False)]
)
def test_a_target_is_met_by_its_own_sign(ratio, target, met):
    assert Result.of("name", ratio, target, "").met is met


@pytest.mark.parametrize("measure", measures.ALL, ids=lambda m: m.__name__)
def test_every_measure_gives_a_ratio_under_its_own_name(bench, own_prompts, measure):
    if measure is measures.memory_growth and not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    result = measure(bench)
    assert result.name == measure.__name__
    assert math.isfinite(result.ratio)
    assert result.target
    assert result.detail


def test_a_measure_that_fails_does_not_lose_the_others(tmp_path, capsys):
    def broken(bench):
        raise RuntimeError("no such thing")

    def fine(bench):
        return Result.of("fine", 1.0, "<= 1.2", "two | walls")

    file = tmp_path / "results.json"
    results = run.run(None, [broken, fine], file)
    assert [(r["name"], r["ratio"], r["met"]) for r in json.loads(file.read_text())] == [
        ("broken", None, False),
        ("fine", 1.0, True),
    ]
    run.markdown(results, "title")
    assert "| fine | 1.00 | <= 1.2 | yes |" in capsys.readouterr().out


def test_every_measure_can_be_asked_for_by_name():
    shown = subprocess.run(
        [sys.executable, RUN, "--help"], capture_output=True, text=True, timeout=110, check=True
    ).stdout
    for measure in measures.ALL:
        assert measure.__name__ in shown.replace("\n", "")


def test_an_unknown_name_is_refused_before_anything_is_loaded():
    refused = subprocess.run(
        [sys.executable, RUN, "--only", "drafting_gain,no_such"], capture_output=True, text=True, timeout=110
    )
    assert refused.returncode == 2
    assert "no measure no_such" in refused.stderr
