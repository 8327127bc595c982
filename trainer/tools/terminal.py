"""A stderr whose loss ends no command: a run outlives the terminal that it was started in."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_log = logging.getLogger(__name__)


class _LastingStderr:
    """Passes everything on to the real stderr until that fails, for example because its terminal was closed.

    After that it drops what is written; a log line, which log.txt keeps, says so."""

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
            self._is_gone = True  # set first: the log line below comes back to this method
            _log.warning("can't write to the terminal (%s): from now on messages go to log.txt only", error.strerror)
            return 0


@contextmanager
def lasting_stderr() -> Iterator[None]:
    """Let no write to stderr raise an OSError while the block runs."""
    before = sys.stderr
    nowhere = open(os.devnull, "w") if before is None else None  # noqa: SIM115 (closed below); `2>&-` leaves no stderr
    sys.stderr = _LastingStderr(nowhere or before)
    try:
        yield
    finally:
        sys.stderr = before
        if nowhere:
            nowhere.close()
