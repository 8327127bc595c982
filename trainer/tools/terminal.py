"""Keep a command running when its stderr fails, so that a run outlives the terminal that it was started in."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_log = logging.getLogger(__name__)


class _LastingStderr:
    """A stderr that writes to the real one until that fails, for example because its terminal was closed.

    After a failure it drops all text, and logs this once; log.txt keeps the log."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_gone = False

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        return not self._is_gone and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, work: Any) -> Any:
        if self._is_gone:
            return 0
        try:
            return work()
        except OSError as error:
            self._is_gone = True  # before the log line, which calls this method again
            _log.warning("cannot write to the terminal (%s): from now on messages go to log.txt only", error.strerror)
            return 0


@contextmanager
def lasting_stderr() -> Iterator[None]:
    """Prevent OSError from writes to stderr while the block runs."""
    before = sys.stderr
    # A command that was started with `2>&-` has no stderr.
    nowhere = open(os.devnull, "w") if before is None else None  # noqa: SIM115 (closed below)
    sys.stderr = _LastingStderr(nowhere or before)
    try:
        yield
    finally:
        sys.stderr = before
        if nowhere:
            nowhere.close()
