"""Progress: a bar on a terminal, lines elsewhere; both say how far, how fast and how much longer."""

import io
import logging
import sys

import pytest

from trainer import progress
from trainer.progress import with_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_count_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(with_progress([[1, 2], [3]], 3, "encode images", size=len)) == [[1, 2], [3]]
    for part in ("encode images", "3/3", "/s", "0:00:00"):
        assert part in terminal.getvalue()


def test_elsewhere_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO):
        assert list(with_progress(range(5), 500, "probe, epochs", size=lambda item: 100)) == list(range(5))
    assert [record.getMessage() for record in caplog.records] == [
        "probe, epochs: 200 of 500, 3/s, 2 minutes left",
        "probe, epochs: 400 of 500, 3/s, 0 minutes left",
    ]


def test_nothing_is_said_where_it_is_not_wanted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert list(with_progress(range(3), 3, "x", False)) == [0, 1, 2]
    assert not caplog.records
