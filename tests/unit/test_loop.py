"""Times of checkpoints and limits of steps. tests/integration/test_run.py tests the loop itself."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.test_setup import run_of
from trainer.data.loader import Batch
from trainer.loop import _SaveTimes, _StepLimits


class Time:
    """Clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Return the clock of the loop; the rest of the process keeps the real time."""
    loop_clock = Time()
    monkeypatch.setattr("trainer.loop.time", SimpleNamespace(monotonic=loop_clock))
    return loop_clock


def test_a_save_by_minutes_is_requested_once(tiny_set: Path, tiny_config: Path, clock: Time) -> None:
    """All ranks agree on it two steps later. Until then it is not repeated, and the time counts from the save."""
    run = run_of(tiny_set, tiny_config, "--checkpoint.every_minutes", "2")
    saves = _SaveTimes(run)
    found = []
    for seconds, saved in ((119, False), (1, False), (1, False), (1, True), (119, False), (1, False)):
        clock.now += seconds
        found.append(saves.minutes_due())
        if saved:
            saves.done()
    assert found == [False, True, False, False, False, True]
    never = _SaveTimes(
        replace(run, config=replace(run.config, checkpoint=replace(run.config.checkpoint, every_minutes=0)))
    )
    clock.now += 1e6
    assert not never.minutes_due()


def test_steps_in_which_a_rank_may_compile_have_a_longer_limit(
    tiny_set: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are the first step at each size of the views and the next two, because the host lags two steps behind."""
    asked = []
    monkeypatch.setattr("trainer.loop.step_seconds", lambda *_, may_compile: asked.append(may_compile))
    limits = _StepLimits(run_of(tiny_set, tiny_config))
    for step, size in enumerate([16, 16, 16, 16, 32, 32, 32, 32], 7):
        limits.seconds(Batch(step, torch.empty(1, 3, size, size), np.arange(1), 0.0))
    assert asked == 2 * [True, True, True, False]


def test_the_watchdog_reports_compilation_in_the_first_step_at_a_size(tiny_set: Path, tiny_config: Path) -> None:
    run = run_of(tiny_set, tiny_config)
    limits = _StepLimits(replace(run, config=replace(run.config, compile="true")))
    said = []
    for step in (7, 8):
        batch = Batch(step, torch.empty(1, 3, 16, 16), np.arange(1), 0.0)
        said.append(limits.describe(batch))
        limits.seconds(batch)
    assert ["is compiled" in text for text in said] == [True, False]
