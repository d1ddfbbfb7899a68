from __future__ import annotations

import io
import logging
import sys

import pytest

from adafuse_engine.progress import track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_outside_a_terminal_start_and_end_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "adafuse_engine"), track("loading x", 2) as advance:
        advance(1)
        assert caplog.messages == ["loading x ..."]
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("loading x: done in")


def test_step_that_fails_is_not_logged_as_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "adafuse_engine"), pytest.raises(RuntimeError), track("loading", 1):
        raise RuntimeError
    assert caplog.messages == ["loading ..."]


def test_in_a_terminal_a_bar_is_drawn(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with caplog.at_level(logging.INFO, "adafuse_engine"), track("loading x", 2) as advance:
        advance(2)
    assert "loading x" in terminal.getvalue()
    assert caplog.messages == []


def test_nothing_is_shown_when_not_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "adafuse_engine"), track("loading", 2, enabled=False) as advance:
        advance(2)
    assert terminal.getvalue() == ""
    assert caplog.messages == []
