"""Signals ask a run to stop. The loop answers between two steps; a thread ends the process if the loop can't.

Python runs a signal handler only when the main thread returns to its bytecode. A rank that hangs in a read, a compilation or a
collective never does, so the handlers here are nearly empty, and a thread reads the signals from a pipe instead.
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

# what a rank asks for; the largest over all ranks holds
GO_ON = 0
PREEMPT = 1
STOP = 2


def aside(work: Callable[[], None]) -> None:
    """Do `work` in a thread and wait for some seconds: the file system it writes to may be what hangs, also behind a log line
    of another thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_ASIDE_SECONDS)


class StopRequest:
    """What this rank was asked: to go on, to save and be started again (a signal), or to save and stay stopped (`wmse stop`).

    Until `allow` is called there is nothing to save, and a signal ends the process at once with exit code 75."""

    def __init__(self) -> None:
        self.level = GO_ON
        self.before_exit: Callable[[], None] = lambda: None  # called before the thread ends the process
        self._seconds = 0.0
        self._since = 0.0
        self._interrupted = False

    @property
    def asked(self) -> bool:
        """Whether the run should end."""
        return self.level > GO_ON

    def ask(self, level: int = PREEMPT) -> None:
        """Ask the loop to end; `level` is PREEMPT or STOP."""
        self.level = max(self.level, level)

    def allow(self, seconds: float) -> None:
        """Say that from now on the loop looks at this request, and needs at most `seconds` to answer it."""
        self._seconds = seconds

    def answered(self) -> None:
        """Restart the clock: all ranks have agreed to stop, and what is left is the last save."""
        self._since = time.monotonic()

    def received(self, number: int) -> None:
        """Take note of a signal, in the thread."""
        if number == signal.SIGINT:
            if self._interrupted:  # the main thread hangs, else the system would have ended the process
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
            aside(lambda: _log.warning("received %s: there is nothing to save, stopping now", name))

    def seconds_left(self) -> float | None:
        """Time until the process is ended, None if no signal has come."""
        return self._since + self._seconds - time.monotonic() if self._since else None

    def end_process(self) -> None:
        """End the process without Python's clean-up, which would wait for whatever hangs."""
        if self._seconds:
            aside(
                lambda: _log.error(
                    "no answer %.0f s after the signal (stop_timeout_seconds): the run hangs and ends without another "
                    "checkpoint; the same command continues from the last one",
                    self._seconds,
                )
            )
        aside(self.before_exit)
        os._exit(PREEMPTED)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn HUP, USR1, USR2, TERM and INT into a stop request while the block runs; a second INT ends the process at once."""
    request = StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def handle(number: int, frame: FrameType | None) -> None:
        request.ask()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    # one that is ignored stays so: nohup ignores HUP, so that a run outlives its terminal
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    pipe_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader, request), name="signals", daemon=True)
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
    """Read signal numbers until the block ends; end the process when its time is up."""
    while True:
        left = request.seconds_left()
        if left is not None and left <= 0:
            request.end_process()
        ready, _, _ = select.select([reader], [], [], left)
        for number in os.read(reader, 64) if ready else b"":
            if number == _CLOSE:
                return
            if number in STOP_SIGNALS:
                request.received(number)
