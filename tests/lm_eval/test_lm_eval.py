"""An ensemble as a model of lm-eval, on rows of our own."""

import json
import sys

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from typer.testing import CliRunner

from adafuse_engine import Engine, EngineConfig, InvalidArgumentError, UnknownArgumentError, write_config
from adafuse_engine.testing import ScriptedMember
from adafuse_integrations.eval_command import OURS, table
from adafuse_integrations.lm_eval import TASKS, AdaFuseLM, compare
from adafuse_integrations.lm_eval.bits import bits
from adafuse_integrations.lm_eval.journal import Answer, Journal
from tests.support import tiny

COLOURS = ["red", "green", "blue", "white", "black", "brown"]
PROMPT = "The ferry leaves"


def rows(name):
    """Rows of the local tasks' form: 24 to take shots from, some to ask in dev and in test."""
    for at in range(36):
        colour = COLOURS[at % 6]
        split = "dev" if at < 30 else "test"
        row = {"id": f"{name}-{at}", "split": split, "question": f"what is colour {at}", "answers": [colour]}
        if name == "squad":
            row["context"] = f"Colour {at} is {colour}."
        if name == "gsm8k":
            row |= {"rationale": f"It is\n{at}.\nTherefore, the answer is {at}", "answers": [str(at)]}
        if name == "flores_de_en":
            row = {"id": f"f-{at}", "split": split, "source": f"Farbe {at}", "target": f"Colour {at} is {colour}."}
        yield row


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in OURS:
        text = "".join(json.dumps(row) + "\n" for row in rows(name))
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def knows(prompt):
    """The answer to the last question of a few-shot prompt, for every local task."""
    last = prompt.split("\n\n")[-1]
    at = next(int(word.strip(".?")) for word in reversed(last.split()) if word.strip(".?").isdigit())
    if "German" in last:
        return f" Colour {at} is {COLOURS[at % 6]}.\nGerman:"
    if "\nQuestion: what is colour" in prompt and f"is {at}." in prompt:
        return f" {COLOURS[at % 6]}\n\nQuestion:"
    return f" {COLOURS[at % 6]}\n"


def local(data):
    """The local tasks alone: lm-eval's own are thousands of files."""
    return TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"data": str(data)})


@pytest.fixture
def scripted():
    with Engine(members=[ScriptedMember("a", knows), ScriptedMember("b", " purple\n", confidence=0.1)]) as engine:
        yield engine


@pytest.fixture(scope="module")
def small():
    with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)], weights=[1, 2]) as engine:
        yield engine


def asked(kind, *arguments):
    return [Instance(kind, {}, given, n) for n, given in enumerate(arguments)]


# ---- the model


def test_the_model_is_registered():
    assert get_model("adafuse") is AdaFuseLM


def test_answers_end_before_their_stop_strings_and_keep_their_order(scripted):
    lm = AdaFuseLM(engine=scripted, batch_size=2)
    requests = asked(
        "generate_until",
        ("Question: colour 1?\nAnswer:", {"until": ["\n"], "max_gen_toks": 8}),
        ("Question: colour 2?\nAnswer:", {"until": ["ue"], "max_gen_toks": 8}),
        ("Question: colour 3?\nAnswer:", {"until": "\n", "do_sample": False}),
    )
    assert lm.generate_until(requests, disable_tqdm=True) == [" green", " bl", " white"]


def test_a_prompt_that_is_too_long_loses_its_beginning():
    with Engine(members=[ScriptedMember("a", " yes", context_window=60)]) as engine:
        lm = AdaFuseLM(engine=engine)
        lm.generate_until(
            asked("generate_until", ("word " * 200 + "the end", {"max_gen_toks": 10})), disable_tqdm=True
        )
        assert engine._members[0].prompts[0].endswith("the end")


def test_likelihoods_are_the_ensembles_own(small):
    lm = AdaFuseLM(engine=small, batch_size=2)
    pairs = [(PROMPT, " the harbour"), (PROMPT, " at"), ("One, ", "two")]
    told = lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    wanted = [small.score(p, t).total() for p, t in [*pairs[:2], ("One,", " two")]]
    assert [value for value, _ in told] == pytest.approx(wanted, abs=1e-4)


def test_what_the_ensemble_would_write_is_greedy(scripted):
    lm = AdaFuseLM(engine=scripted)
    context = "Question: colour 1?\nAnswer:"
    told = lm.loglikelihood(asked("loglikelihood", (context, " green"), (context, " blue")), True)
    assert [greedy for _, greedy in told] == [True, False]


def test_a_whole_text_is_scored_in_windows_where_it_is_too_long(small):
    lm = AdaFuseLM(engine=small)
    text = "The ferry leaves the harbour."
    [short] = lm.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert short == pytest.approx(small.score("", text).total(), abs=1e-4)
    [long] = lm.loglikelihood_rolling(asked("loglikelihood_rolling", (text * 60,)), disable_tqdm=True)
    assert long < 10 * short


def test_wrong_arguments_are_refused(small):
    with pytest.raises(InvalidArgumentError, match="one of models"):
        AdaFuseLM()
    with pytest.raises(UnknownArgumentError, match="threshold"):
        AdaFuseLM(engine=small, treshold=1)
    with pytest.raises(InvalidArgumentError, match="2 weights for 1 member"):
        AdaFuseLM(models="x", weights="1+2")


# ---- the tasks


@pytest.mark.parametrize("task", ["squad", "triviaqa", "natural_questions", "flores_de_en"])
@pytest.mark.parametrize("split", ["", "_dev"])
def test_the_local_tasks_run_offline(task, split, data, scripted):
    manager = local(data)
    lm = AdaFuseLM(engine=scripted)
    name = f"adafuse_{task}{split}"
    done = simple_evaluate(lm, tasks=[name], task_manager=manager, bootstrap_iters=0)
    mark = done["results"][name]["chrf,none" if task == "flores_de_en" else "exact_match,none"]
    assert mark == pytest.approx(100 if task == "flores_de_en" else 1)
    assert len(done["samples"][name]) == 6


def test_numbers_are_marked_by_the_last_one(data):
    def counts(prompt):
        at = prompt.rsplit("colour ", 1)[1].split("\n")[0]
        return f" First 3, then more. The answer is {at}.\n"

    with Engine(members=[ScriptedMember("a", counts)]) as engine:
        manager = local(data)
        done = simple_evaluate(
            AdaFuseLM(engine=engine), tasks=["adafuse_gsm8k"], task_manager=manager, bootstrap_iters=0
        )
    assert done["results"]["adafuse_gsm8k"]["exact_match,none"] == 1
    shown = done["samples"]["adafuse_gsm8k"][0]["arguments"][0][0]
    assert "Answer: It is 1. The answer is 1.\n\nQuestion:" in shown


def test_rows_that_are_not_there_are_told(monkeypatch, tmp_path):
    manager = local(tmp_path)
    with pytest.raises(InvalidArgumentError, match="say where the rows are"):
        manager.load(["adafuse_squad"])


# ---- systems side by side


@pytest.fixture
def systems(monkeypatch):
    """An ensemble's systems, on scripted members in place of the models that are named."""
    answers = {"good": knows, "bad": " purple\n"}

    def shared(config):
        members = [ScriptedMember(m.label, answers[m.label], confidence=0.8) for m in config.members]
        return Engine(members=members, weights=[m.weight for m in config.members])

    monkeypatch.setattr(Engine, "shared", shared)
    config = EngineConfig(members=[{"model": "good", "weight": 3.0}, "bad"])
    return lambda folder=None: compare.systems(config, compare.BASELINES, folder)


def test_every_system_is_marked_beside_the_best_member(systems, data):
    done = compare.compare(systems(), ["adafuse_squad"], include=TASKS, data=data)
    marks = {o.system: o for o in done if o.metric == "exact_match"}
    assert list(marks) == ["member:good", "member:bad", "ensemble", "paper", "unite", "rerank", "majority"]
    assert marks["member:good"].mark == 100
    assert marks["member:bad"].mark == 0
    assert marks["ensemble"].over_best == marks["ensemble"].mark / 100
    assert marks["member:bad"].over_best is None
    assert marks["majority"].mark == 100
    assert all(o.low <= o.mark <= o.high for o in done)
    assert all(o.forward_passes > 0 for o in done)
    text = table(done)
    assert text.count("\n| squad | ") == len(done)


def test_a_run_goes_on_where_it_was_stopped(systems, data, tmp_path, monkeypatch):
    def run(limit):
        made = systems(tmp_path)
        few = {name: made[name] for name in ("member:good", "ensemble")}
        return compare.compare(few, ["adafuse_squad"], include=TASKS, data=data, limit=limit)

    first = run(3)
    written = []
    original = AdaFuseLM.write
    monkeypatch.setattr(AdaFuseLM, "write", lambda self, p, **o: (written.extend(p), original(self, p, **o))[1])
    again = run(3)
    assert written == []
    assert [o.mark for o in again] == [o.mark for o in first]
    assert [o.forward_passes for o in again] == [o.forward_passes for o in first]
    run(4)
    assert len(written) == 2  # one more row for each system


def test_other_settings_and_other_members_are_not_answered_from_the_journal(tmp_path):
    path = tmp_path / "a.jsonl"
    request = asked("generate_until", ("Question?\nAnswer:", {"until": ["\n"]}))

    def answer(member, **settings):
        with Engine(members=[member]) as engine:
            return AdaFuseLM(engine=engine, journal=path, **settings).generate_until(request, disable_tqdm=True)

    assert answer(ScriptedMember("a", " one two three")) == [" one two three"]
    assert answer(ScriptedMember("a", " other")) == [" one two three"]
    assert answer(ScriptedMember("a", " other"), max_words=1) == [" other"]
    assert answer(ScriptedMember("b", " third")) == [" third"]


def test_a_configurations_settings_hold_whatever_the_shared_engine_was_made_with(tmp_path, monkeypatch):
    write_config(tmp_path / "c.toml", EngineConfig(members=["x"], decoding={"threshold": 0.3}))
    with Engine(members=[ScriptedMember("x", " yes")]) as engine:
        monkeypatch.setattr(Engine, "shared", lambda config: engine)
        lm = AdaFuseLM(config=tmp_path / "c.toml", max_words=2)
    assert (lm.settings["threshold"], lm.settings["max_words"]) == (0.3, 2)


def test_a_line_that_a_kill_cut_is_left_out_of_the_journal(tmp_path):
    path = tmp_path / "a.jsonl"
    journal = Journal(path)
    journal.add("one", {"stop": ["x"]}, Answer("1", 3))
    journal.add("two", {}, Answer("2", 4))
    path.write_text(path.read_text()[:-9])
    again = Journal(path)
    assert again.find("one", {"stop": ["x"]}) == Answer("1", 3)
    assert again.find("two", {}) is None
    assert len(again) == 1


def test_an_unknown_baseline_is_refused():
    with pytest.raises(InvalidArgumentError, match="baseline: one of paper"):
        compare.systems(EngineConfig(members=["x"]), ["magic"], None)


# ---- the commands


def test_the_command_writes_results_and_a_table(systems, data, tmp_path):
    from adafuse_engine.cli.main import app

    write_config(tmp_path / "c.toml", EngineConfig(members=["good", "bad"]))
    out = tmp_path / "out"
    given = [
        "--config",
        str(tmp_path / "c.toml"),
        "-t",
        "triviaqa",
        "--split",
        "dev",
        "-b",
        "paper",
        "--limit",
        "2",
    ]
    result = CliRunner().invoke(app, ["eval", *given, "--data", str(data), "-o", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads((out / "results.json").read_text())
    assert {o["system"] for o in document["outcomes"]} == {"member:good", "member:bad", "ensemble", "paper"}
    assert document["about"]["split"] == "dev"
    assert (out / "table.md").read_text().startswith("| task | system |")


def test_lm_evals_own_command_line_knows_the_model(monkeypatch, capsys):
    from adafuse_integrations.lm_eval.__main__ import cli_evaluate

    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", "--model", "adafuse", "--tasks", "none-such"])
    with pytest.raises((SystemExit, ValueError)):
        cli_evaluate()


def test_the_mixture_needs_fewer_bits_than_its_best_member(data):
    """Each member knows half of the answers; weights are learned on dev and hold on test."""

    def half(first):
        return lambda prompt: knows(prompt) if int(prompt.split()[-2].strip("?")) % 2 == first else " purple\n"

    with Engine(members=[ScriptedMember("a", half(0)), ScriptedMember("b", half(1))]) as engine:
        found = bits(engine, "triviaqa", str(data))
    assert found["mixture"] < min(found["a"], found["b"])
    assert found["weight of a"] == pytest.approx(0.5, abs=0.1)
