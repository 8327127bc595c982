"""Progress: a bar on a terminal, lines elsewhere; both say how far, how fast and how much longer."""

import io
import logging
import sys

import pytest

from trainer import progress
from trainer.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_count_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(show_progress([[1, 2], [3]], 3, "encode", "images", len)) == [[1, 2], [3]]
    shown = terminal.getvalue()
    assert "encode" in shown
    assert "3/3" in shown
    assert "images/s" in shown
    assert "0:00:00" in shown


def test_elsewhere_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO):
        assert list(show_progress(range(8), 80, "probe", "epochs", lambda item: 10)) == list(range(8))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "probe: 30 of 80 epochs, 0.4 epochs/s, 0:02:05 left",
        "probe: 60 of 80 epochs, 0.4 epochs/s, 0:00:50 left",
    ]
