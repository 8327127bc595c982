"""Detect that a run stands still: log what it waits for, and end the process after the limit of what it is doing.

A rank whose file system hangs holds all others up, and no exception ends it: only another thread can. The same holds for a
step that hangs in one of NCCL's collectives. Other steps have no limit: one may be long (a recipe's on a laptop), and gloo's
collectives raise errors by themselves.

Time in which this process could not run does not count, for example while a job is suspended (SIGSTOP): the thread wakes often,
and the time between two of its checks counts as no more than twice its sleep.
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
_News = tuple[float, str, float | None]  # since when (seconds awake), what, limit


class Watchdog:
    """Watches while its block runs; the loop tells it whenever something else begins."""

    def __init__(
        self,
        warn_seconds: float,
        details: Callable[[], str],
        before_exit: Sequence[Callable[[str], None]],
        on_stall: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Warn after `warn_seconds` without progress, and again each time that this time has doubled.

        details: says more about the wait, or returns an empty text. before_exit: called one after the other before the process
        ends, with what the run waits for. on_stall: called with the same text whenever it is logged, and with "" when the run
        makes progress again.
        """
        self._warn_seconds = warn_seconds
        self._details = details
        self._before_exit = tuple(before_exit)
        self._on_stall = on_stall
        self._sleep_seconds = min(warn_seconds / 4, _MAX_SLEEP_SECONDS)
        self._awake = 0.0  # seconds in which the process could run, counted by the thread
        self._news: _News = (self._awake, "starts", None)  # replaced whole: the two threads need no lock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def doing(self, what: str, *, limit: float | None = None) -> None:
        """Something new begins. limit: seconds after which it is taken for hung and the process is ended; None: never."""
        self._news = (self._awake, what, limit)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        warned = (self._news, 0.0)
        checked = time.monotonic()
        while not self._ended.wait(self._sleep_seconds):
            checked, before = time.monotonic(), checked
            self._awake += min(checked - before, 2 * self._sleep_seconds)
            news = self._news
            since, what, limit = news
            seconds = self._awake - since
            if news is not warned[0]:
                if warned[1]:
                    self._on_stall("")
                warned = (news, 0.0)
            if limit is not None and seconds >= limit:
                self._end(seconds, what)
            elif seconds >= max(self._warn_seconds, 2 * warned[1]):
                warned = (news, seconds)
                stall = f"no news for {seconds:.0f} s: the run {what}{self._more()}"
                _log.warning("%s", stall)
                self._on_stall(stall)

    def _more(self) -> str:
        details = self._details()
        return f" ({details})" if details else ""

    def _end(self, seconds: float, what: str) -> None:
        more = self._more()
        aside(
            lambda: _log.error(
                "no news for %.0f s (the limit follows from timeout_minutes): the run %s%s. It ends here; what each thread "
                "does follows. The same command continues from the last checkpoint",
                seconds,
                what,
                more,
            )
        )
        faulthandler.dump_traceback(2, all_threads=True)
        for last in self._before_exit:
            aside(partial(last, f"no news for {seconds:.0f} s: the run {what}{more}"))
        os._exit(FAILED)  # the threads that hang can't be ended, and Python would wait for them
