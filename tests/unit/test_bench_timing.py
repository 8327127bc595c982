"""Windows: long enough, in turns, and only what belongs under the clock."""

import time

import pytest
import torch

from trainer.bench import timing
from trainer.bench.loss import MODES, _window
from trainer.bench.timing import MIN_WINDOWS, spread, take_turns, timed, timed_after

CPU = torch.device("cpu")


def test_windows_of_a_fast_function_have_many_calls_and_take_turns_with_a_slow_one() -> None:
    seconds_a_call = {"fast": 0.0001, "slow": 0.02}
    made: list[tuple[str, int]] = []

    def window(name: str, calls: int) -> float:
        made.append((name, calls))
        return calls * seconds_a_call[name]

    samples = take_turns({name: lambda calls, name=name: window(name, calls) for name in seconds_a_call}, seconds=0)
    assert samples == {"fast": [pytest.approx(100)] * MIN_WINDOWS, "slow": [pytest.approx(20000)] * MIN_WINDOWS}
    assert made == [("fast", 1), ("slow", 1)] * 2 + [("fast", 50), ("slow", 1)] * MIN_WINDOWS


def test_rounds_go_on_until_the_time_is_up() -> None:
    start = time.perf_counter()
    samples = take_turns({"sleep": timed(lambda: time.sleep(0.006), CPU)}, seconds=0.1)
    assert time.perf_counter() - start >= 0.1
    assert len(samples["sleep"]) > MIN_WINDOWS


class Clock:
    """Stands in for the module `time`: only what is told to last lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def lasts(self, seconds: float) -> None:
        self.now += seconds


def test_every_call_is_timed_but_not_what_prepares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert timed(lambda: clock.lasts(2), CPU)(3) == 6
    prepared = iter(range(3))

    def prepare() -> int:
        clock.lasts(100)
        return next(prepared)

    given = []

    def function(number: int) -> None:
        given.append(number)
        clock.lasts(2)

    assert timed_after(prepare, function, CPU)(3) == 6
    assert given == [0, 1, 2]


def test_each_mode_of_the_loss_times_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Lasting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, v: torch.Tensor) -> torch.Tensor:
            clock.lasts(1)
            return v.sum()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            clock.lasts(10)
            return gradient.expand(3)

    v = torch.zeros(3, requires_grad=True)
    seconds = {mode: _window(lambda: Lasting.apply(v), mode, v)(2) for mode in MODES}
    assert seconds == {"forward": 2, "backward": 20, "forward_backward": 22}


def test_median_and_quartiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3, "quartile_1": 2, "quartile_3": 4, "windows": 5}
