"""Watchdog thread: logs what a run waits for if it makes no progress, and ends the process after a time limit.

A rank whose file system hangs blocks all other ranks. No exception ends it; only another thread can. The same holds for
a step that hangs in an NCCL collective. Other steps have no limit: a step may take long (a recipe on a laptop), and
gloo's collectives raise errors by themselves.

Time in which this process could not run does not count, for example while a job is suspended (SIGSTOP). The thread wakes up
often, and counts the time between two of its checks as twice its sleep at most.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from trainer.errors import FAILED
from trainer.run.signals import aside

_log = logging.getLogger(__name__)
_MAX_SLEEP_SECONDS = 1.0
_Activity = tuple[float, str, float | None]  # start (seconds awake), description, limit in seconds


class Watchdog:
    """Watchdog that runs while its block does. The loop reports each new activity with `doing`."""

    def __init__(
        self,
        warn_seconds: float,
        details: Callable[[], str],
        before_exit: Sequence[Callable[[str], None]],
        on_stall: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Warn after `warn_seconds` without progress, and again each time that this time has doubled.

        details: returns details of the wait, or an empty text. before_exit: functions that are called one after the
        other before the process ends, with a text that says what the run waits for. on_stall: called with the same text
        whenever it is logged, and with "" when the run makes progress again.
        """
        self._warn_seconds = warn_seconds
        self._details = details
        self._before_exit = tuple(before_exit)
        self._on_stall = on_stall
        self._sleep_seconds = min(warn_seconds / 4, _MAX_SLEEP_SECONDS)
        self._awake = 0.0  # seconds in which the process could run, counted by the thread
        self._activity: _Activity = (self._awake, "starts", None)  # replaced as a whole, so no lock is needed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def doing(self, what: str, *, limit: float | None = None) -> None:
        """Report that a new activity begins.

        what: the activity, as it follows the words "the run" in a log line. limit: seconds after which the activity
        counts as hung and the process is ended; None: never."""
        self._activity = (self._awake, what, limit)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        watched = self._activity
        warned_seconds = 0.0  # length of the watched activity at its last warning; 0: no warning yet
        checked = time.monotonic()
        while not self._ended.wait(self._sleep_seconds):
            # Count the time since the last check, but no time in which the process was suspended.
            now = time.monotonic()
            self._awake += min(now - checked, 2 * self._sleep_seconds)
            checked = now

            activity = self._activity
            if activity is not watched:
                if warned_seconds:
                    self._on_stall("")
                watched = activity
                warned_seconds = 0.0
            since, what, limit = activity
            seconds = self._awake - since
            if limit is not None and seconds >= limit:
                self._end(seconds, what)
            elif seconds >= max(self._warn_seconds, 2 * warned_seconds):
                warned_seconds = seconds
                stall = f"no progress for {seconds:.0f} s: the run {what}{self._more()}"
                _log.warning("%s", stall)
                self._on_stall(stall)

    def _more(self) -> str:
        details = self._details()
        return f" ({details})" if details else ""

    def _end(self, seconds: float, what: str) -> None:
        """Log the hang with the stack of every thread, and end the process."""
        more = self._more()
        aside(
            lambda: _log.error(
                "no progress for %.0f s (the limit follows from timeout_minutes): the run %s%s. The process ends; the stack of "
                "each thread follows. The same command continues from the last checkpoint",
                seconds,
                what,
                more,
            )
        )
        faulthandler.dump_traceback(2, all_threads=True)
        for last in self._before_exit:
            aside(partial(last, f"no progress for {seconds:.0f} s: the run {what}{more}"))
        os._exit(FAILED)  # Python's normal exit would wait for the threads that hang
