"""How far long work is: a bar on a terminal, a log line every minute elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

T = TypeVar("T")
_LOG_SECONDS = 60.0
_log = logging.getLogger(__name__)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:.0f}/s")


def with_progress(items: Iterable[T], total: int, title: str, progress: bool = True) -> Iterator[T]:
    """Yield the same items, showing how many of `total` have been taken, their rate and the time that is left."""
    console = Console(stderr=True)
    if not progress:
        yield from items
    elif console.is_terminal:
        columns = (TextColumn(title), BarColumn(20), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            yield from bar.track(items, total)
    else:
        yield from _with_log_lines(items, total, title)


def _with_log_lines(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    began = said = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said >= _LOG_SECONDS:
            said, rate = now, number / (now - began)
            minutes = (total - number) / rate / 60
            _log.info("%s: %d of %d, %.0f/s, %.0f minutes left", title, number, total, rate, minutes)
