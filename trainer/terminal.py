"""The terminal of a run: a progress bar below the log lines, and a stderr whose loss ends nothing."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_log = logging.getLogger(__name__)
_ROOM_FOR_TEXT = 70  # columns


class _LastingStderr:
    """Hands everything to the real stderr until that fails, as it does when its terminal is gone. After that it drops what is
    written, and log.txt says so: a run outlives the window that it was started in."""

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
            self._is_gone = True  # before the log line, which comes back here
            _log.warning("can't write to the terminal (%s): from now on messages go to log.txt only", error.strerror)
            return 0


@contextmanager
def lasting_stderr() -> Iterator[None]:
    """While the block runs, no write to stderr raises an OSError."""
    before = sys.stderr
    nowhere = open(os.devnull, "w") if before is None else None  # noqa: SIM115 (closed below); `2>&-` leaves no stderr
    sys.stderr = _LastingStderr(nowhere or before)
    try:
        yield
    finally:
        sys.stderr = before
        if nowhere:
            nowhere.close()


class Bar:
    """The progress of a run in one line, which fits 40 columns. Where stderr is no terminal it shows nothing."""

    def __init__(self, first_step: int, end_step: int, console: Console | None = None) -> None:
        """console: where to draw; None: stderr, if it is a terminal."""
        if console is None and sys.stderr.isatty():
            console = Console(stderr=True)
        self._progress = _progress(console) if console else None
        if self._progress:
            self._task = self._progress.add_task("", total=end_step, completed=first_step)
            self._progress.start()

    def move(self, step: int, text: str | None = None) -> None:
        """Show that `step` updates were made. text: shown where there is room, until another comes."""
        if self._progress:
            self._progress.update(self._task, completed=step, description=text)

    def close(self) -> None:
        """Leave the line as it is and give the terminal back."""
        if self._progress:
            self._progress.stop()


def _progress(console: Console) -> Progress:
    text = [TextColumn("{task.description}")] if console.width >= _ROOM_FOR_TEXT else []
    columns = (MofNCompleteColumn(), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn(), *text)
    return Progress(*columns, console=console, expand=True)
