"""``adafuse`` and ``adafuse models``."""

import json
import sys

import pytest
from typer.testing import CliRunner

from adafuse_engine import bundled
from adafuse_engine.cli import main


def run(*arguments):
    return CliRunner().invoke(main.app, list(arguments))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAFUSE_CACHE", str(tmp_path))


def test_list_names_every_packaged_model_with_its_licence():
    rows = json.loads(run("models", "list", "--json").stdout)
    assert [r["name"] for r in rows] == [f"bundled:{n}" for n in bundled.NAMES]
    assert not any(r["fetched"] for r in rows)
    assert "Gemma Terms of Use" in rows[1]["licence"]
    assert "bundled:" in run("models", "list").stdout


def test_version():
    assert run("--version").stdout.strip()


def test_an_error_is_one_line_and_status_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["adafuse", "models", "fetch", "smollm"])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err.startswith("error: no packaged model is called 'smollm'; did you mean")


def test_fetch_needs_a_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["adafuse", "models", "fetch"])
    with pytest.raises(SystemExit):
        main.main()
    assert "--all" in capsys.readouterr().err
