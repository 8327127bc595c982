"""Shows how far a long piece of work is, at which rate and for how much longer: a bar on a terminal, else a line a minute."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

T = TypeVar("T")
_LINE_SECONDS = 60.0
_log = logging.getLogger(__name__)


def show_progress(
    items: Iterable[T], total: int, title: str, unit: str, size: Callable[[T], int] = lambda item: 1
) -> Iterator[T]:
    """Hand the items on. total: in units, of which an item counts size(item)."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), _Rate(unit))
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)
            for item in items:
                yield item
                bar.advance(task, size(item))
        return
    began = said = time.monotonic()
    done = 0
    for item in items:
        yield item
        done += size(item)
        now = time.monotonic()
        if now - said >= _LINE_SECONDS and done < total:
            said, rate = now, done / (now - began)
            left = timedelta(seconds=round((total - done) / rate))
            _log.info("%s: %d of %d %s, %.1f %s/s, %s left", title, done, total, unit, rate, unit, left)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f} {self._unit}/s" if task.speed else "")
