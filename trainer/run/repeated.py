"""Steps that a restart makes again: are their lines of metrics.jsonl the same as the first time?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.run.digests import first_different

_log = logging.getLogger(__name__)


class RepeatedSteps:
    """Compares the new lines of a restart with those that it dropped, and logs the outcome once."""

    def __init__(self, dropped: Sequence[Mapping[str, Any]], first_step: int, last_line: int, rounding: str) -> None:
        """dropped: lines after `first_step` that an earlier start wrote. last_line: step of the line before them.

        rounding: why results may be rounded differently than the first time; empty: they should be identical."""
        self._first = first_step + 1
        self._rounding = rounding
        # A mean is over the steps since the line before, so a line is known by both steps.
        self._dropped: dict[tuple[int, int], Mapping[str, Any]] = {}
        before = last_line
        for line in dropped:
            self._dropped[before, line["step"]] = line
            before = line["step"]
        self._last = before if dropped else first_step
        self._before = last_line
        self._equal_to = 0  # step of the last line that was identical
        if dropped:
            _log.info("%s made again%s", _steps(self._first, self._last, "is", "are"), self._because())

    def compare(self, line: Mapping[str, Any]) -> None:
        """Compare a new line."""
        step = line["step"]
        # Each line is compared once.
        known = self._dropped.pop((self._before, step), None)
        self._before = step
        if known is None:
            return
        name = first_different(known, line)
        if name is None:
            self._equal_to = step
            if step == self._last:
                self.close()
            return
        same = f"identical up to step {self._equal_to}, and " if self._equal_to else ""
        _log.warning(
            "%s made again after the restart: %sdifferent from the first time from step %d on: %s %s instead of %s%s; "
            "docs/diff.md says how to find out why",
            _steps(self._first, self._last, "was", "were"),
            same,
            step,
            name,
            line[name],
            known[name],
            self._because(),
        )
        # Later lines differ because of this one, so they are not compared.
        self._equal_to = 0
        self._dropped.clear()

    def close(self) -> None:
        """Log how far the lines were identical, unless the outcome was logged before."""
        if self._equal_to:
            again = "made again after the restart and"
            steps = _steps(self._first, self._equal_to, f"was {again} is", f"were {again} are")
            _log.info("%s identical to the first time", steps)
        self._equal_to = 0
        self._dropped.clear()

    def _because(self) -> str:
        """Explain why other values are no surprise; empty if they would be."""
        return f" ({self._rounding}, so rounding differs)" if self._rounding else ""


def _steps(first: int, last: int, one: str, several: str) -> str:
    """Name a range of steps with its verb."""
    if first == last:
        return f"step {first} {one}"
    return f"steps {first} to {last} {several}"
