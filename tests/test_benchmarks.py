"""The benchmark's own parts: prompts with or without data beside the repository, and the list of measures."""

import subprocess
import sys
from pathlib import Path

from tests.benchmarks import measures, prompts

RUN = Path(__file__).parent / "benchmarks" / "run.py"


def test_without_data_the_prompts_are_our_own(monkeypatch, tmp_path):
    monkeypatch.setattr(prompts, "DATA", tmp_path / "none.jsonl")
    assert prompts.short(5)[4].startswith("The lighthouse")
    assert prompts.short(1)[0].endswith("Question: Who built the lighthouse?\nAnswer:")


def test_a_passage_has_about_as_many_tokens_as_asked_for():
    for tokens in (20, 300):
        assert 0.8 * tokens < len(prompts.passage_of(str.split, tokens).split()) <= tokens


def test_the_plain_road_remembers_nothing():
    known = measures.Forgetful()
    for _ in range(3):
        assert (1, 2) not in known
        known[1, 2] = "row"
    assert known.asked == 3


def test_every_measure_can_be_asked_for_by_name():
    shown = subprocess.run(
        [sys.executable, RUN, "--help"], capture_output=True, text=True, timeout=110, check=True
    ).stdout
    for measure in measures.ALL:
        assert measure.__name__ in shown.replace("\n", "")
