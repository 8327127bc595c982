"""Checks: how one is measured, and its outcome.

A group of checks is a function that yields items, (name, function). The function measures an error and returns it with its
bound, or raises `SkipCheck` with the reason why this machine cannot run it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainer.distributed.ranks import Ranks

_log = logging.getLogger(__name__)
EXACT = 0.0  # bound of results that must be equal bit for bit


class Measured(NamedTuple):
    """Error of a check and the largest error with which it passes. NaN never passes."""

    error: float
    bound: float


class SkipCheck(Exception):  # noqa: N818  no error: the machine lacks what the check needs
    """The check cannot run here; the message says what is missing."""


Item = tuple[str, Callable[[], Measured]]


@dataclass(frozen=True)
class Place:
    """Device, ranks and files of a verification."""

    device: torch.device
    ranks: Ranks
    folder: Path
    """Temporary folder, which is deleted at the end."""

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Check:
    """Outcome of one check."""

    group: str
    name: str
    result: Literal["passed", "failed", "skipped"]
    error: float | str | None = None
    """A text, such as "inf", where JSON has no number."""
    bound: float | None = None
    reason: str = ""
    """Why it was skipped, or the exception that ended it."""
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Return the check as values for JSON, which knows no infinity."""
        error = self.error
        is_odd = isinstance(error, float) and not math.isfinite(error)
        return {**vars(self), "error": str(error) if is_odd else error}


def run_items(group: str, items: Iterable[Item]) -> list[Check]:
    """Measure the items of a group one after the other."""
    checks = []
    for name, measure in items:
        began = time.perf_counter()
        check = _outcome(group, name, measure)
        checks.append(replace(check, seconds=round(time.perf_counter() - began, 2)))
    return checks


def _outcome(group: str, name: str, measure: Callable[[], Measured]) -> Check:
    try:
        error, bound = measure()
    except SkipCheck as skip:
        return Check(group, name, "skipped", reason=str(skip))
    # Whatever goes wrong inside, the other checks must still run. The table shows the error, the log its place.
    except Exception as failure:
        _log.debug("%s: %s", group, name, exc_info=True)
        first_line = str(failure).partition("\n")[0]
        return Check(group, name, "failed", reason=f"{type(failure).__name__}: {first_line}")
    # A NaN fails here as well, because every comparison with it is false.
    result: Literal["passed", "failed"] = "passed" if error <= bound else "failed"
    return Check(group, name, result, float(error), bound)


def draw_normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw normal numbers of mean 0 and variance 1 in float64, on the CPU, so that every device gets the same ones."""
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a share of the largest expected value (at least of 1e-12)."""
    actual = actual.detach().double().cpu()
    expected = expected.detach().double().cpu()
    # Broadcasting would hide a missing dimension.
    if actual.shape != expected.shape:
        raise ValueError(f"the shape is {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    # One scale for the whole tensor: single elements may be 0 but for rounding.
    scale = expected.abs().max().clamp_min(1e-12)
    return ((actual - expected).abs().max() / scale).item()


def largest(*errors: float) -> float:
    """Return the largest error; NaN if any of them is NaN, which `max` may drop."""
    if any(math.isnan(error) for error in errors):
        return math.nan
    return max(errors)


def largest_relative(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the largest relative error of pairs of an actual and an expected tensor."""
    errors = [relative_error(actual, expected) for actual, expected in pairs]
    return largest(*errors)
