"""The watchdog warns of a process without progress and ends it after a limit."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from trainer.run.watchdog import Watchdog

# the fixture `ends` raises in a thread
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of exit codes with which the process would have ended."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit  # ends the watchdog's thread only

    monkeypatch.setattr(os, "_exit", end)
    return codes


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_with_progress_there_are_no_warnings(ends: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with Watchdog(0.8, lambda: "", []) as watchdog:
        for step in range(10):
            watchdog.doing(f"waits for the images of step {step}", limit=1.0)
            time.sleep(0.15)
    assert ends == []
    assert caplog.records == []


def test_warnings_come_after_doubling_waits_and_then_the_process_ends(
    ends: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    last = []
    with Watchdog(0.1, lambda: "reads cat.jpg for 9 s", [last.append]) as watchdog:
        watchdog.doing("waits for the images of step 3", limit=1.0)
        time.sleep(1.3)
    warned = messages(caplog, logging.WARNING)
    assert 2 <= len(warned) <= 4  # near 0.1, 0.2, 0.4, 0.8 s
    assert all("the run waits for the images of step 3 (reads cat.jpg for 9 s)" in text for text in warned)
    (ended,) = messages(caplog, logging.ERROR)
    assert "(reads cat.jpg for 9 s). The process ends" in ended
    (text,) = last
    assert text.endswith("the run waits for the images of step 3 (reads cat.jpg for 9 s)")
    assert ends == [1]


def test_an_activity_without_a_limit_gives_warnings_only(ends: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with Watchdog(0.1, lambda: "", []) as watchdog:
        watchdog.doing("makes step 3")
        time.sleep(0.6)
    assert messages(caplog, logging.WARNING)
    assert ends == []


def test_a_new_activity_is_warned_of_again(ends: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with Watchdog(0.1, lambda: "", []) as watchdog:
        for what in ("a", "b"):
            watchdog.doing(what)
            time.sleep(0.17)
    said = [text.split("the run ")[1] for text in messages(caplog, logging.WARNING)]
    assert list(dict.fromkeys(said)) == ["a", "b"]


def test_the_process_ends_although_before_exit_fails(ends: list[int]) -> None:
    last: list[str] = []

    def full_disk(text: str) -> None:
        raise OSError(28, "No space left on device")

    with Watchdog(0.1, lambda: "", [full_disk, last.append]) as watchdog:
        watchdog.doing("waits for the images of step 3", limit=0.2)
        time.sleep(0.5)
    assert ends == [1]
    assert len(last) == 1


def test_a_stall_is_reported_and_cleared(ends: list[int]) -> None:
    told: list[str] = []
    with Watchdog(0.1, lambda: "", [], told.append) as watchdog:
        watchdog.doing("makes step 3")
        time.sleep(0.16)
        watchdog.doing("makes step 4")
        time.sleep(0.06)
    assert "the run makes step 3" in told[0]
    assert told[-1] == ""


WAITS = """
import sys, time
from trainer.run.watchdog import Watchdog
with Watchdog(0.2, lambda: "", []) as watchdog:
    for what in ("waits", "continues"):
        watchdog.doing(what, limit=0.8)
        print(what, flush=True)
        sys.stdin.readline()
"""


def test_time_in_which_the_process_was_suspended_does_not_count() -> None:
    """The process is suspended for twice the limit, continues, and then waits for too long."""
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "waits\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.6)
        child.send_signal(signal.SIGCONT)
        time.sleep(0.15)  # the watchdog looks in this time
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "continues\n"
        assert child.wait(60) == 1
