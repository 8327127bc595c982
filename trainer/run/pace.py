"""Pace of a run: how fast its step alone is, and where the rest of the time goes.

Each rank measures some steps whose updates are skipped while its loader rests, then adds up in every step what came before it.
The sums of all ranks travel in the all-reduce of a logged line, and rank 0 divides its time among the causes.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from trainer.data.loader import Batch, ViewLoader
from trainer.run.shares import RankPace
from trainer.run.signals import StopRequest
from trainer.run.step_times import StepTimes, seconds_between
from trainer.step import TrainStep

_log = logging.getLogger(__name__)
WARM_STEPS = 3  # at a size of the views, before the step alone is measured: they compile and allocate
ALONE_STEPS = 3  # measured; the median counts
_FEWEST_USUAL = 10  # steps from which the fast ones of the run's own steps count
_MOST_USUAL = 100
_LONGEST_REST = 30.0  # seconds to wait until the loader has filled its queues
_REST_WINDOW = 0.02
_REST_USE = 0.25  # cores that a resting process may use


class _Before(NamedTuple):
    """Seconds of the host between two steps."""

    inputs: float = 0.0  # the loader waits for its readers
    views: float = 0.0  # the loader waits for DALI
    checkpoint: float = 0.0
    host: float = 0.0


class Pace:
    """Measures the pace of one rank. The loop calls `before_step` and `after_step` around each step."""

    def __init__(
        self, step: TrainStep, loader: ViewLoader, end_step: int, stop: StopRequest, *, forward_is_own: bool = True
    ) -> None:
        """stop: a run that is asked to stop does not wait for its loader to rest.

        forward_is_own: False if the forward waits for other ranks, so that its time says nothing about this one."""
        self._step = step
        self._loader = loader
        self._end_step = end_step
        self._stop = stop
        self._forward_is_own = forward_is_own
        self._size = 0
        self._steps_at_size = 0
        self._alone: list[StepTimes] = []  # the steps alone at this size, empty before they are made
        self._applied: StepTimes | None = None  # the step before them
        self._is_new = False  # whether the time of the steps alone has to be left out of the next line
        self._end_of_last: Any = None
        self._waiting: deque[tuple[Any, StepTimes, _Before]] = deque()  # steps that the device may not have made yet
        self._usual: deque[float] = deque(maxlen=_MOST_USUAL)  # seconds of the latest steps
        self._left_out = 0.0
        self._checkpoint = 0.0
        self._host_since = time.perf_counter()
        self._before = _Before()
        self._start()

    def _start(self) -> None:
        """Start a new interval of steps."""
        self._steps = 0
        self._seconds = 0.0
        self._forward = 0.0
        self._lost = np.zeros(len(_Before._fields))

    @property
    def delay(self) -> float:
        """Seconds by which waits for the loader and checkpoints have delayed the step that begins; 0 while not measured."""
        return self._before.inputs + self._before.views + self._before.checkpoint if self._alone else 0.0

    def before_step(self, batch: Batch, learning_rate: float, labels: Tensor | None) -> None:
        """Note what came before a step. Measure the step alone if it is warm at the size of its views.

        All ranks measure in the same step."""
        outside = time.perf_counter() - self._host_since
        for_views = max(batch.wait_seconds - batch.input_seconds, 0.0)
        host = max(outside - batch.wait_seconds - self._checkpoint, 0.0)
        self._before = _Before(batch.input_seconds, for_views, self._checkpoint, host)
        self._checkpoint = 0.0
        size = batch.views.shape[-1]
        if size != self._size:
            self._size = size
            self._steps_at_size = 0
            self._alone = []
        # A run that ends with this step does not need the figure.
        if self._steps_at_size == WARM_STEPS and batch.step + 1 < self._end_step:
            self._measure(batch, learning_rate, labels)
        self._steps_at_size += 1

    def _measure(self, batch: Batch, learning_rate: float, labels: Tensor | None) -> None:
        began = time.perf_counter()
        _log.info("measuring the step alone: %d steps without an update, while the loader rests", ALONE_STEPS)
        self._applied = self._step.times
        _wait_for_rest(self._stop)
        alone = []
        for _ in range(ALONE_STEPS):
            stop = self._stop.level
            result = self._step(batch.views, batch.step, learning_rate, labels=labels, stop=stop, apply=False)
            alone.append(self._step.times)
            # The ranks have agreed on the stop. On a GPU reading it would wait for the device, whose steps are short.
            if self._step.device.type == "cpu" and result.flags.stop:
                break
        self._alone = alone
        self._usual.clear()
        self._is_new = True
        # The interval begins here. The wait for this step's batch lies before it.
        self._left_out += time.perf_counter() - began
        self._before = _Before()
        self._end_of_last = alone[-1].end
        self._waiting.clear()
        self._loader.split_waits(0.0, 0.0, 0.0)
        self._start()

    def after_step(self) -> None:
        """Note the times of the step that was made."""
        times = self._step.times
        if self._alone:
            self._waiting.append((self._end_of_last, times, self._before))
        self._end_of_last = times.end
        # On a GPU these are earlier steps: the host does not wait for the device.
        while self._waiting and self._waiting[0][1].is_known():
            self._add(*self._waiting.popleft())
        self._host_since = time.perf_counter()

    def _add(self, end_of_last: Any, times: StepTimes, before: _Before) -> None:
        """Add a step whose times are known."""
        self._steps += 1
        self._seconds += seconds_between(end_of_last, times.end)
        self._forward += times.seconds("forward")
        self._usual.append(times.seconds())
        # The host may be ahead of a GPU: only the time in which the device had nothing to do is lost.
        idle = seconds_between(end_of_last, times.begin)
        whole = sum(before)
        if whole > 0:
            self._lost += np.array(before) * min(idle / whole, 1.0)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time the block as work on a checkpoint."""
        began = time.perf_counter()
        yield
        self._checkpoint += time.perf_counter() - began

    def take_left_out(self) -> float:
        """Return the seconds since the last call that belong to no step of the run, for the clock of the log line."""
        # The host only queues a GPU's steps, whose time follows.
        if self._is_new and self._alone[-1].is_known():
            self._is_new = False
            if self._step.device.type == "cuda":
                self._left_out += sum(times.seconds() for times in self._alone)
        seconds, self._left_out = self._left_out, 0.0
        return seconds

    def take(self) -> RankPace:
        """Return the sums since the last call, and start a new interval."""
        if not self._alone or not self._steps:
            return RankPace()
        for_inputs, for_views, checkpoint, host = self._lost.tolist()
        waits = self._loader.split_waits(for_inputs, for_views, self._seconds / self._steps)
        forward = alone_forward = np.nan
        if self._forward_is_own:
            forward = self._forward
            alone_forward = statistics.median(times.seconds("forward") for times in self._alone)
        views = self._step.images.count * self._step.num_views
        taken = RankPace(
            views, self._steps, self._seconds, self._alone_seconds(), alone_forward, forward, *waits, checkpoint, host
        )
        self._start()
        return taken

    def _alone_seconds(self) -> float:
        """Return the seconds of a step alone, with the update of a step that was applied: on a CPU a skipped one is shorter.

        On a busy machine a few steps alone may be slow by chance. Then the fast ones of the usual steps count."""
        assert self._applied is not None
        without_update = statistics.median(times.seconds() - times.seconds("update") for times in self._alone)
        alone = without_update + self._applied.seconds("update")
        if len(self._usual) < _FEWEST_USUAL:
            return alone
        fast = statistics.quantiles(self._usual, n=10)[0]
        return min(alone, fast)


def _wait_for_rest(stop: StopRequest) -> None:
    """Wait until the threads of this process have little to do: the loader has filled its queues, or waits for a disk."""
    end = time.monotonic() + _LONGEST_REST
    while time.monotonic() < end and not stop.asked:
        used = time.process_time()
        time.sleep(_REST_WINDOW)
        if time.process_time() - used < _REST_USE * _REST_WINDOW:
            return
