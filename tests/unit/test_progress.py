"""Progress: a bar on a terminal and log lines elsewhere, both with count, rate and remaining time."""

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from trainer import progress
from trainer.progress import RunBar, with_progress

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


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


def test_without_a_terminal_one_line_a_minute_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO):
        assert list(with_progress(range(5), 500, "probe, epochs", size=lambda item: 100)) == list(range(5))
    assert [record.getMessage() for record in caplog.records] == [
        "probe, epochs: 200 of 500, 3/s, 2 minutes left",
        "probe, epochs: 400 of 500, 3/s, 0 minutes left",
    ]


def test_nothing_is_shown_without_progress(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert list(with_progress(range(3), 3, "x", False)) == [0, 1, 2]
    assert not caplog.records


@pytest.mark.parametrize("width", [40, 80])
def test_the_bar_moves_each_step_and_fits_the_terminal(width: int) -> None:
    out = io.StringIO()
    bar = RunBar(31190, 31200, Console(file=out, width=width, force_terminal=True))
    for step in range(31191, 31196):
        bar.move(step, "loss 0.812  1690 img/s" if step == 31193 else None)
        bar._progress.refresh()
    bar.close()
    drawn = [CONTROL.sub("", line) for line in re.split(r"[\r\n]", out.getvalue())]
    drawn = [line for line in drawn if line]
    assert max(map(len, drawn)) <= width
    for step in range(31191, 31196):
        assert any(f"{step}/31200" in line for line in drawn)
    assert ("loss 0.812" in drawn[-1]) == (width == 80)
