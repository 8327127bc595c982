"""Try the choices one after the other, each against the best settings so far, until the time is over."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import torch

from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.tune.choices import Choice, all_choices
from trainer.tune.measure import Outcome, compare

SHARE = 0.6  # of the time of a choice that is left for timing; building, checking and compiling take the rest
NAN = float("nan")


@dataclass
class Tuning:
    """The choices so far, and the settings that were taken."""

    tried: list[tuple[Choice, Outcome]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)


def tune(
    make: Callable[[Mapping[str, str]], Config], device: torch.device, minutes: float, tuning: Tuning
) -> Iterator[Choice]:
    """Try every choice and note it in `tuning`, so that an interruption loses nothing. Yields each before it is tried.

    make: returns the recipe with settings over it; raises InputError if they do not fit."""
    end = time.monotonic() + 60 * minutes
    choices = all_choices(make({}), device, minutes)
    left = sum(not choice.refused for choice in choices)
    for choice in choices:
        if choice.refused:
            tuning.tried.append((choice, _not_tried(choice.refused)))
            continue
        yield choice
        seconds = (end - time.monotonic()) / left
        left -= 1
        outcome = _try(choice, make, tuning.settings, device, SHARE * seconds, end)
        tuning.tried.append((choice, outcome))
        if outcome.taken:
            tuning.settings |= choice.settings


def _try(
    choice: Choice,
    make: Callable[[Mapping[str, str]], Config],
    taken: Mapping[str, str],
    device: torch.device,
    seconds: float,
    end: float,
) -> Outcome:
    if seconds <= 0:
        return _not_tried("no time was left: give more --minutes")
    try:
        best, other = make(taken), make({**taken, **choice.settings})
        if other == best:
            return _not_tried("is the recipe's value")
        if device.type == "cuda":
            return _in_a_process(choice.part, best, other, device, seconds, end)
        return compare(choice.part, best, other, device, seconds)
    except InputError as error:
        return _not_tried(f"refused: {error}")
    # A choice that fails must not lose the others; the table names it.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return _not_tried(f"failed: {type(error).__name__}: {first_line}")


def _in_a_process(part: str, best: Config, choice: Config, device: torch.device, seconds: float, end: float) -> Outcome:
    """Compare in a new process, because an illegal access of a kernel ends every later use of the GPU in its process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        future = pool.submit(compare, part, best, choice, device, seconds)
        try:
            return future.result(timeout=max(1.0, end - time.monotonic()))
        except FutureTimeoutError:
            for process in list(pool._processes.values()):
                process.kill()
            return _not_tried("the time was over before it was built and checked: give more --minutes")
        except BrokenProcessPool:
            return _not_tried("failed: it ended the process")


def _not_tried(why: str) -> Outcome:
    return Outcome({}, NAN, False, why)
