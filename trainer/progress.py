"""Show the progress of long work with a known number of items, and of a run. Bars appear on a terminal only.

The package rich is only imported to draw a bar, so that an index, and with it a step, can be built without it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task
    from rich.text import Text

T = TypeVar("T")
_LOG_SECONDS = 60.0
_MIN_COLUMNS_FOR_TEXT = 70
_log = logging.getLogger(__name__)


def with_progress(
    items: Iterable[T], total: int, title: str, progress: bool = True, size: Callable[[T], int] = lambda item: 1
) -> Iterator[T]:
    """Yield the items, and show the number done, items per second and the time left.

    The display is a bar on a terminal, and otherwise a log line every minute.

    total: number of items. progress: False shows nothing. size: number of items that one element of `items` counts for."""
    # A bar redraws its line, which a log file cannot show.
    if not progress:
        yield from items
    elif sys.stderr.isatty():
        yield from _with_bar(items, total, title, size)
    else:
        yield from _with_log_lines(items, total, title, size)


def _with_bar(items: Iterable[T], total: int, title: str, size: Callable[[T], int]) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    # rich has columns for bytes per second, but none for items per second.
    class Speed(ProgressColumn):
        """Column with the number of items per second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed or 0
            return Text(f"{speed:.0f}/s")

    columns = (TextColumn(title), BarColumn(20), MofNCompleteColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        for item in items:
            yield item
            bar.advance(task, size(item))


def _with_log_lines(items: Iterable[T], total: int, title: str, size: Callable[[T], int]) -> Iterator[T]:
    began = logged = time.monotonic()
    number = 0
    for item in items:
        yield item
        # The generator continues here when the caller has finished the item.
        number += size(item)
        now = time.monotonic()
        if now - logged >= _LOG_SECONDS:
            logged = now
            speed = number / (now - began)
            minutes = (total - number) / speed / 60
            _log.info("%s: %d of %d, %.0f/s, %.0f minutes left", title, number, total, speed, minutes)


class RunBar:
    """Progress bar of a run below the log lines, which fits 40 columns. Shows nothing if stderr is not a terminal."""

    def __init__(self, first_step: int, end_step: int, console: Console | None = None) -> None:
        """console: console to draw on; None: stderr, if it is a terminal."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        if console is None and sys.stderr.isatty():
            console = Console(stderr=True)
        self._progress: Progress | None = None
        if console:
            # A narrow terminal has no space for the text.
            text = [TextColumn("{task.description}")] if console.width >= _MIN_COLUMNS_FOR_TEXT else []
            columns = (MofNCompleteColumn(), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn(), *text)
            self._progress = Progress(*columns, console=console, expand=True)
            self._task = self._progress.add_task("", total=end_step, completed=first_step)
            self._progress.start()

    def move(self, step: int, text: str | None = None) -> None:
        """Show that `step` updates were made.

        text: shown on a wide terminal until the next text; None: keep the last text."""
        if self._progress:
            self._progress.update(self._task, completed=step, description=text)

    def close(self) -> None:
        """Stop drawing, and leave the line on the terminal."""
        if self._progress:
            self._progress.stop()
