"""Try the choices one after the other, each against the best settings so far, until the time is over."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.tune.choices import Choice, all_choices
from trainer.tune.measure import Outcome, compare

SHARE = 0.6  # of the time of a choice that is left for timing; building, checking and compiling take the rest
LOADER_SHARE = 0.7  # of the time of a step; a slower loader is worth tuning
MOST_OF_THE_REST = 0.5  # of the time that is left, for one choice
Make = Callable[[Mapping[str, str]], Config]


@dataclass
class Tuning:
    """The choices so far, and the settings that were taken."""

    tried: list[tuple[Choice, Outcome]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    step_ms: float = math.nan
    """Milliseconds of a step with these settings; NaN if no step was timed."""


def tune(
    make: Callable[[Mapping[str, str]], Config],
    device: torch.device,
    minutes: float,
    tuning: Tuning,
    *,
    in_process: bool = False,
) -> Iterator[Choice]:
    """Try every choice and note it in `tuning`, so that an interruption loses nothing. Yields each before it is tried.

    make: returns the recipe with settings over it; raises InputError if they do not fit. in_process: compare in this process,
    which a choice can then end or hold up."""
    end = time.monotonic() + 60 * minutes
    choices = all_choices(make({}), device, minutes)
    left = sum(not choice.refused for choice in choices)
    with nullcontext() if in_process else _Worker() as worker:
        for choice in choices:
            if choice.refused:
                tuning.tried.append((choice, _not_tried(choice.refused)))
                continue
            yield choice
            seconds = (end - time.monotonic()) / left
            left -= 1
            latest = end - (1 - MOST_OF_THE_REST) * (end - time.monotonic())
            outcome = _try(choice, make, tuning.settings, device, SHARE * seconds, latest, worker)
            outcome = _only_if_it_matters(choice, outcome, tuning.step_ms)
            tuning.tried.append((choice, outcome))
            if outcome.taken:
                tuning.settings |= choice.settings
            if choice.part == "step" and outcome.milliseconds:
                tuning.step_ms = outcome.milliseconds["after" if outcome.taken else "before"]


def _try(
    choice: Choice,
    make: Make,
    taken: Mapping[str, str],
    device: torch.device,
    seconds: float,
    latest: float,
    worker: _Worker | None,
) -> Outcome:
    if seconds <= 0:
        return _not_tried("no time was left: give more --minutes")
    try:
        best, other = make(taken), make({**taken, **choice.settings})
        if other == best:
            return _not_tried("is the recipe's value")
        if worker is None:
            return compare(choice.part, best, other, device, seconds)
        return worker.compare(choice.part, best, other, device, seconds, latest)
    except InputError as error:
        return _not_tried(f"refused: {error}")
    # A choice that fails must not lose the others; the table names it.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return _not_tried(f"failed: {type(error).__name__}: {first_line}")


def _only_if_it_matters(choice: Choice, outcome: Outcome, step_ms: float) -> Outcome:
    """Return the outcome, but do not take a faster loader if the present one is well ahead of the step."""
    if choice.part != "loader" or not outcome.taken:
        return outcome
    before = outcome.milliseconds["before"]
    if before < LOADER_SHARE * step_ms:
        why = f"the loader is fast enough: {before:.3g} ms, a step takes {step_ms:.3g} ms"
        return replace(outcome, taken=False, why=why)
    return outcome


class _Worker:
    """A process that compares. A choice that ends it, or that takes too long, loses nothing but itself."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    def compare(
        self,
        part: str,
        best: Config,
        choice: Config,
        device: torch.device,
        seconds: float,
        latest: float,
    ) -> Outcome:
        """Compare as `measure.compare`, until `latest` at most."""
        if self._pool is None:
            # A child of fork could not use CUDA.
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        future = self._pool.submit(compare, part, best, choice, device, seconds)
        try:
            return future.result(timeout=max(1.0, latest - time.monotonic()))
        except FutureTimeoutError:
            self._kill()
            return _not_tried("took too long to check and time: give more --minutes")
        except BrokenProcessPool:
            self._kill()
            return _not_tried("failed: it ended its process")

    def _kill(self) -> None:
        if self._pool is None:
            return
        for process in list(self._pool._processes.values()):
            process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None


def _not_tried(why: str) -> Outcome:
    return Outcome({}, math.nan, False, why)
