"""Choosing a threshold and weights, and saying so where one member alone is better."""

import pytest

from adafuse_engine import DecodingConfig, InvalidArgumentError
from adafuse_engine.calibration.calibrate import calibrate, chance_above
from adafuse_engine.calibration.marks import MARKS, contains, exact_match, f1, number_match
from adafuse_engine.calibration.report import reliability, write_report
from adafuse_engine.calibration.trials import Lab, Row, Trial, read_rows
from adafuse_engine.testing import ScriptedMember

QUESTIONS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
ROWS = [Row(f"What is {q}?", (f"number {q}",)) for q in QUESTIONS]


def knows(*known, surely=0.9):
    """Answers for a member that is right and sure on these questions, and else wrong and unsure."""

    def answer(prompt):
        word = prompt.removeprefix("What is ").removesuffix("?")
        return f" number {word}" if word in known else " guess who"

    return answer


def lab(*answers, confidences=(0.9, 0.9), rows=ROWS):
    members = [
        ScriptedMember("ab"[i], a, confidence=c) for i, (a, c) in enumerate(zip(answers, confidences, strict=True))
    ]
    return Lab(members, rows, exact_match, DecodingConfig(max_tokens=8))


def test_where_the_best_member_alone_is_better_it_is_chosen_and_that_is_said():
    done = calibrate(lab(knows(*QUESTIONS), knows()), [1.0, 1.0])
    assert done.harmless
    assert done.chosen.members == ("a",)
    assert done.best_alone.quality == 1.0
    assert "a alone has 100.0" in done.verdict


def test_an_ensemble_may_be_kept_all_the_same():
    done = calibrate(lab(knows(*QUESTIONS), knows()), [1.0, 1.0], keep_ensemble=True)
    assert done.chosen.members == ("a", "b")
    assert "no better" in done.verdict


def test_weights_follow_who_knows_the_answers():
    done = calibrate(lab(knows(*QUESTIONS), knows("one")), [1.0, 1.0])
    assert done.learned["a"] > 0.8
    assert done.bits_per_byte["mixture"] <= done.bits_per_byte["a"] + 0.05 < done.bits_per_byte["b"]


def test_a_limit_on_cost_is_kept():
    done = calibrate(lab(knows(*QUESTIONS), knows(*QUESTIONS)), [1.0, 1.0], keep_ensemble=True, most_fused=0.0)
    assert done.chosen.fused_share == 0.0


def test_without_answers_a_limit_is_needed_and_nothing_is_said_of_quality():
    rows = [Row(r.prompt) for r in ROWS]
    unlabelled = lab(knows(*QUESTIONS), knows("one"), confidences=(0.75, 0.4), rows=rows)
    with pytest.raises(InvalidArgumentError, match="without answers"):
        calibrate(unlabelled, [1.0, 1.0])
    done = calibrate(unlabelled, [1.0, 1.0], most_fused=0.5)
    assert done.chosen.fused_share <= 0.5
    assert "Nothing is known of quality" in done.verdict
    assert done.best_alone is None


def test_one_member_needs_no_choice():
    done = calibrate(lab(knows("one"), confidences=(0.9,)), [1.0])
    assert done.chosen.quality == 1 / 8


def test_the_report_is_one_page_with_all_that_was_tried(tmp_path):
    done = calibrate(lab(knows(*QUESTIONS), knows("one")), [1.0, 1.0])
    write_report(tmp_path / "r.html", done, "A <title>")
    page = (tmp_path / "r.html").read_text()
    assert "A &lt;title&gt;" in page
    assert "<title>A <" not in page
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page
    for trial in (*done.alone, *done.rules, *done.curve):
        assert trial.name in page


def test_reliability_groups_answers_by_how_sure_they_were():
    trial = Trial("t", {}, (1.0,), ("x",) * 4, (0.0, 0.0, 1.0, 1.0), (0.2, 0.1, 0.9, 0.8), 1, 0.0)
    assert reliability(trial, bins=2) == [(pytest.approx(0.15), 0.0, 2), (pytest.approx(0.85), 1.0, 2)]


def test_a_difference_is_judged_on_the_same_rows():
    better = [1.0] * 60 + [0.0] * 40
    worse = [1.0] * 50 + [0.0] * 50
    assert chance_above(better, worse) > 0.99
    assert chance_above(better, better) == 0.0


# ---- rows and marks


def test_rows_are_read_with_one_answer_or_many(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answers": ["x", "y"]}\n\n{"prompt": "b", "answer": "z"}\n')
    assert read_rows(path) == [Row("a", ("x", "y")), Row("b", ("z",))]
    assert read_rows(path, limit=1) == [Row("a", ("x", "y"))]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no rows"),
        ("{}", "line 1 has no prompt"),
        ('{"prompt": "a"}\nnot json', "line 2 is no JSON"),
        ('{"prompt": "a", "answers": [1]}', "answers are a list of texts"),
        ('{"prompt": "a"}\n{"prompt": "b", "answer": "c"}', "either all rows have answers or none"),
    ],
)
def test_rows_that_cannot_be_used_are_told_with_their_line(tmp_path, text, says):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=says):
        read_rows(path)
    with pytest.raises(InvalidArgumentError):
        read_rows(tmp_path / "none.jsonl")


def test_marks():
    assert exact_match(" The Eiffel Tower.", ["eiffel tower"]) == 1
    assert contains("It is the Eiffel Tower, I think", ["Eiffel Tower"]) == 1 != contains("towers", ["tower"])
    assert f1("the big red dog", ["red dog"]) == pytest.approx(0.8)
    assert f1("", ["x"]) == 0.0
    assert number_match("So 3 and then 1,200.", ["1200"]) == 1 != number_match("none", ["1"])
    assert set(MARKS) == {"exact_match", "f1", "contains", "number"}


# ---- the command

UNEQUAL = (knows(*QUESTIONS), knows())


@pytest.fixture
def command(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from adafuse_engine.cli import calibrate as module
    from adafuse_engine.cli.main import app

    def run(*arguments, answers=UNEQUAL):
        members = [ScriptedMember("ab"[i], a) for i, a in enumerate(answers)]
        monkeypatch.setattr(module, "load_members", lambda config: members)
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f'{{"prompt": "{r.prompt}", "answers": ["{r.answers[0]}"]}}\n' for r in ROWS))
        out = tmp_path / "out.toml"
        given = ["calibrate", str(path), "-o", str(out), "-m", "a", "-m", "b", "--max-tokens", "8", *arguments]
        return CliRunner().invoke(app, given), out

    return run


def test_the_command_writes_a_configuration_that_can_be_read(command, tmp_path):
    from adafuse_engine import read_config

    report = tmp_path / "report.html"
    result, out = command("--report", str(report), "--stop", r"\n")
    assert result.exit_code == 0, result.output
    assert "a alone has 100.0" in result.output
    config = read_config(out)
    assert [m.model for m in config.members] == ["a"]
    assert config.decoding.stop == ("\n",)
    assert config.decoding.max_tokens == 8
    assert report.exists()


def test_the_command_writes_weights_where_an_ensemble_is_kept(command):
    from adafuse_engine import read_config

    result, out = command("--keep-ensemble", answers=(knows(*QUESTIONS), knows(*QUESTIONS[:4])))
    assert result.exit_code == 0, result.output
    assert [m.model for m in read_config(out).members] == ["a", "b"]


def test_an_unknown_mark_is_refused(command):
    result, _ = command("--mark", "beauty")
    assert isinstance(result.exception, InvalidArgumentError)
