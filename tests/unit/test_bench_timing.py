"""Timing windows alternate, last long enough, and contain only the timed function."""

import time

import pytest
import torch

from trainer.bench.timing import MAX_WINDOWS, MIN_WINDOWS, interleave, spread, timed, timed_after

CPU = torch.device("cpu")


class Timer:
    """Stand-in for a timed function: each call takes `seconds`. It records the number of calls of each window."""

    def __init__(self, seconds: float, made: list[tuple[float, int]]) -> None:
        self.seconds = seconds
        self.made = made

    def __call__(self, calls: int) -> float:
        self.made.append((self.seconds, calls))
        return calls * self.seconds


def test_windows_of_fast_and_slow_functions_alternate_and_last_equally_long() -> None:
    made: list[tuple[float, int]] = []
    samples = interleave({"fast": Timer(1e-4, made), "slow": Timer(0.02, made)}, 4.0)
    assert samples["fast"] == [pytest.approx(1e-4)] * MAX_WINDOWS
    assert samples["slow"] == [pytest.approx(0.02)] * MAX_WINDOWS
    assert made[-4:] == [(1e-4, 400), (0.02, 2)] * 2
    assert sum(seconds * calls for seconds, calls in made) == pytest.approx(4.0, rel=0.1)


def test_a_slow_function_has_few_windows_of_one_call() -> None:
    made: list[tuple[float, int]] = []
    assert interleave({"slow": Timer(5.0, made)}, 1.0)["slow"] == [5.0] * MIN_WINDOWS
    assert [calls for _, calls in made] == [1] * (2 + MIN_WINDOWS)
    made.clear()
    assert len(interleave({"slow": Timer(0.1, made)}, 1.0, min_calls=5, num_windows=2)["slow"]) == 2
    assert made[-1] == (0.1, 5)


def test_the_preparation_of_a_call_is_not_timed() -> None:
    given = []
    seconds = timed_after(lambda: time.sleep(0.05) or 7, given.append, CPU)(3)
    assert given == [7, 7, 7]
    assert seconds < 0.05
    assert timed(lambda: time.sleep(0.01), CPU)(3) >= 0.03


def test_the_spread_has_median_and_quartiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0], 10) == {"median": 30, "quartile_1": 20, "quartile_3": 40, "windows": 5}
