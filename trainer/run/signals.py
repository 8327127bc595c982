"""Signals that ask a run to stop. The loop stops between two steps; if it hangs, a thread ends the process.

Python runs a signal handler only when the main thread returns to its bytecode. A rank that hangs in a read, a
compilation or a collective never returns. So the handlers here are nearly empty, and a thread reads the signals from a
pipe instead.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trainer.errors import INTERRUPTED, PREEMPTED

_log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
_CLOSE = 0  # byte that ends the thread; no signal has this number
_ASIDE_SECONDS = 3.0

# Requests of a rank. The largest request of all ranks applies to all.
GO_ON = 0  # continue
PREEMPT = 1  # save, and be started again
STOP = 2  # save, and stay stopped


def aside(work: Callable[[], None]) -> None:
    """Run `work` in a thread and wait for it for at most some seconds.

    Use it before the process ends: a write, or even a log line, may hang on a file system."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_ASIDE_SECONDS)


class StopRequest:
    """Request to this rank: GO_ON, PREEMPT (a signal came) or STOP (`wmse stop` was called).

    Before `allow` is called, the run has nothing to save and a signal ends the process at once with exit code 75."""

    def __init__(self) -> None:
        self.level = GO_ON
        self.before_exit: Callable[[], None] = lambda: None  # called before the thread ends the process
        self._seconds = 0.0
        self._since = 0.0
        self._interrupted = False

    @property
    def asked(self) -> bool:
        """True if the run was asked to end."""
        return self.level > GO_ON

    def ask(self, level: int = PREEMPT) -> None:
        """Ask the loop to end; `level` is PREEMPT or STOP."""
        self.level = max(self.level, level)

    def allow(self, seconds: float) -> None:
        """Let the loop answer requests from now on. It gets `seconds` to save after a signal."""
        self._seconds = seconds

    def answered(self) -> None:
        """Restart the time limit: all ranks have agreed to stop, and only the last save remains."""
        self._since = time.monotonic()

    def received(self, number: int) -> None:
        """Handle a signal in the thread: log it, request the stop and start the time limit."""
        if number == signal.SIGINT:
            # After the first INT the main thread restores the system's handler. A second INT only gets here if it hangs.
            if self._interrupted:
                os._exit(INTERRUPTED)
            self._interrupted = True
        if self._since:
            return
        self._since = time.monotonic()
        self.ask()
        name = signal.Signals(number).name
        if self._seconds:
            aside(lambda: _log.warning("received %s: saving a checkpoint and stopping after the current step", name))
        else:
            aside(lambda: _log.warning("received %s: the run has nothing to save and stops now", name))

    def seconds_left(self) -> float | None:
        """Return the time until the process is ended; None if no signal has arrived."""
        if not self._since:
            return None
        return self._since + self._seconds - time.monotonic()

    def end_process(self) -> None:
        """End the process without Python's clean-up, which would wait for the thread that hangs."""
        if self._seconds:
            aside(
                lambda: _log.error(
                    "the run did not stop within %.0f s of the signal (stop_timeout_seconds): it hangs, and ends without "
                    "another checkpoint; the same command continues from the last one",
                    self._seconds,
                )
            )
        aside(self.before_exit)
        os._exit(PREEMPTED)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn HUP, USR1, USR2, TERM and INT into a stop request while the block runs.

    A second INT ends the process at once."""
    request = StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def handle(number: int, frame: FrameType | None) -> None:
        request.ask()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    # An ignored signal stays ignored: nohup ignores HUP so that a run outlives its terminal.
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    # Python writes the number of each signal into the pipe at once, even if the main thread hangs.
    pipe_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_watch,
        args=(reader, request),
        name="signals",
        daemon=True,
    )
    thread.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(pipe_before)
        for number, old in before.items():
            signal.signal(number, old)
        os.write(writer, bytes([_CLOSE]))
        thread.join()
        os.close(reader)
        os.close(writer)


def _watch(reader: int, request: StopRequest) -> None:
    """Read signal numbers from the pipe until the block ends. End the process when the time limit has passed."""
    while True:
        left = request.seconds_left()
        if left is not None and left <= 0:
            request.end_process()
        ready, _, _ = select.select([reader], [], [], left)
        numbers = os.read(reader, 64) if ready else b""
        for number in numbers:
            if number == _CLOSE:
                return
            if number in STOP_SIGNALS:
                request.received(number)
