"""Signals ask a run to stop, and end a process that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from trainer.errors import INTERRUPTED, PREEMPTED
from trainer.run.signals import PREEMPT, STOP, StopRequest, stop_on_signals

SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_each_signal_asks_to_stop_and_the_old_handler_is_restored(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in SIGNALS]
    with stop_on_signals() as stop:
        stop.allow(60)
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.level == PREEMPT
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_the_first_interrupt_restores_the_default_handler_for_the_second() -> None:
    with stop_on_signals() as stop:
        stop.allow(60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert stop.asked


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """A run that nohup started ignores SIGHUP, so it outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            stop.allow(60)
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_new_block_ignores_earlier_signals() -> None:
    with stop_on_signals() as stop:
        stop.allow(60)
        os.kill(os.getpid(), signal.SIGUSR1)
    with stop_on_signals() as stop:
        assert not stop.asked


def test_a_signal_does_not_weaken_a_request_to_stay_stopped() -> None:
    stop = StopRequest()
    stop.ask(STOP)
    stop.ask(PREEMPT)
    assert stop.level == STOP


# The main thread hangs in C code, on a lock that is never released, so that it runs no Python signal handler.
HANG = """
import ctypes, sys, time
from trainer.run.signals import stop_on_signals
libc = ctypes.CDLL(None)
def hang(seconds):
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    libc.pthread_mutex_lock(mutex)
with stop_on_signals() as stop:
    stop.before_exit = lambda: print("last words", flush=True)
    {allow}
    hang(60)
"""


@pytest.fixture
def hanging() -> Callable[[str], subprocess.Popen[str]]:
    """Return a function that starts a process. Its main thread runs a line of code with `stop` and then hangs."""

    def begin(allow: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HANG.format(allow=allow)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        return process

    return begin


def test_a_signal_before_the_first_step_ends_a_process_that_hangs_at_once(
    hanging: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = hanging("pass")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == PREEMPTED
    assert process.communicate()[0] == "last words\n"


def test_a_run_that_hangs_in_a_step_ends_after_the_time_limit(hanging: Callable[[str], subprocess.Popen[str]]) -> None:
    process = hanging("stop.allow(1.0)")
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(60) == PREEMPTED
    assert time.monotonic() - began > 0.8


@pytest.mark.slow
def test_a_log_that_hangs_does_not_delay_the_end(hanging: Callable[[str], subprocess.Popen[str]]) -> None:
    """Another thread hangs in a write to the log and holds the lock of its handler."""
    process = hanging("import logging; logging.lastResort.acquire()")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == PREEMPTED


def test_a_second_interrupt_ends_a_process_that_hangs(hanging: Callable[[str], subprocess.Popen[str]]) -> None:
    process = hanging("stop.allow(60)")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "received SIGINT" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    # ended by the thread, or by the system if the first signal came just before the main thread hung
    assert process.wait(20) in (INTERRUPTED, -signal.SIGINT)


def test_wmse_stop_sets_no_time_limit(hanging: Callable[[str], subprocess.Popen[str]]) -> None:
    process = hanging("from trainer.run.signals import STOP; stop.allow(0.1); stop.ask(STOP)")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.kill()
    process.wait()
