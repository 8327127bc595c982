"""Pace of a rank whose device is behind the host, as a GPU is. integration/test_pace_of_runs.py has whole runs on a CPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.data.loader import Batch
from trainer.data.stage_times import Waits
from trainer.run import pace
from trainer.run.signals import StopRequest
from trainer.run.step_times import StepTimes

CUDA = torch.device("cuda")


class Device:
    """A device that does its work when the test says so. Each step takes it 1 s, and what comes before a step its idle time."""

    def __init__(self) -> None:
        self.queued = 0.0  # time at which the work that was given to it will be done
        self.now = 0.0  # time up to which it has worked

    def stamp(self, _: torch.device) -> "Event":
        return Event(self, self.queued)


class Event:
    def __init__(self, device: Device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds

    def query(self) -> bool:
        return self._seconds <= self._device.now

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "the host would wait for the device"
        return 1e3 * (end._seconds - self._seconds)


class Step:
    """Step of 4 images and 2 views: forward 0.4 s, rest 0.6 s."""

    images = SimpleNamespace(count=4)
    num_views = 2
    device = CUDA

    def __init__(self, device: Device) -> None:
        self._device = device
        self.applied: list[bool] = []
        self.times = StepTimes(CUDA)

    def __call__(self, *_: Any, apply: bool = True, **__: Any) -> None:
        self.times = StepTimes(CUDA)
        with self.times.span("forward"):
            self._device.queued += 0.4
        self._device.queued += 0.6
        self.times.finish()
        self.applied.append(apply)


def test_a_gpu_is_timed_without_waiting_and_only_its_idle_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is three seconds behind the host. It idles for 0.5 s before each, while the host waits for images."""
    device = Device()
    monkeypatch.setattr("trainer.run.step_times._stamp", device.stamp)
    monkeypatch.setattr(pace, "_wait_for_rest", lambda _: None)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    step: Any = Step(device)
    loader: Any = SimpleNamespace(split_waits=lambda inputs, views, _: Waits(inputs, 0.0, 0.0, views))
    measured = pace.Pace(step, loader, 20, StopRequest())
    for number in range(10):
        batch = Batch(number, torch.empty(1, 3, 8, 8), np.arange(4), wait_seconds=2.0, input_seconds=1.5)
        clock.now += 2.0  # of which the device is idle for a quarter
        device.queued += 0.5
        measured.before_step(batch, 0.1, None)
        assert measured.delay == (2.0 if number > 3 else 0.0)
        step(batch.views)
        measured.after_step()
        device.now = device.queued - 3.0 if number > 2 else 0.0
    # Three steps alone before the fourth. The device has made most of the seven steps after them.
    assert step.applied == 3 * [True] + 3 * [False] + 7 * [True]
    assert measured.take_left_out() == pytest.approx(3.0)
    assert measured.take_left_out() == 0
    taken = measured.take()
    assert taken.views_per_step == 8
    assert (taken.alone, taken.alone_forward) == pytest.approx((1.0, 0.4))
    assert taken.seconds == pytest.approx(
        1.0 * taken.steps + 0.5 * (taken.steps - 1)
    )  # nothing before the first counts
    assert taken.forward == pytest.approx(0.4 * taken.steps)
    assert (taken.reader, taken.views) == pytest.approx((0.375 * (taken.steps - 1), 0.125 * (taken.steps - 1)))
    assert 3 <= taken.steps < 7


def test_a_run_that_ends_makes_no_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr("trainer.run.step_times._stamp", device.stamp)
    step: Any = Step(device)
    loader: Any = SimpleNamespace()
    measured = pace.Pace(step, loader, 4, StopRequest())
    for number in range(4):
        measured.before_step(Batch(number, torch.empty(1, 3, 8, 8), np.arange(4), 0.0), 0.1, None)
        step()
        measured.after_step()
    assert step.applied == 4 * [True]
    assert np.isnan(measured.take().alone)


def test_a_busy_loader_is_waited_for_until_the_run_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process uses a whole core until 1 s has passed."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    busy = SimpleNamespace(monotonic=lambda: clock.now, process_time=lambda: min(clock.now, 1.0), sleep=sleep)
    monkeypatch.setattr(pace, "time", busy)
    stop = StopRequest()
    pace._wait_for_rest(stop)
    assert 1.0 < clock.now < 1.1
    clock.now = 0.0
    stop.ask()
    pace._wait_for_rest(stop)
    assert clock.now == 0
