"""Signals ask a run to stop; the loop does it between two steps."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether a signal has come."""

    asked = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """USR1, USR2, TERM and INT set the flag while the block runs; a second INT stops at once, wherever the run hangs."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        request.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the system's: an exception would wait for threads that hang
        _log.warning("%s: the run saves and stops after the steps under way", signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, old in before.items():
            signal.signal(number, old)
