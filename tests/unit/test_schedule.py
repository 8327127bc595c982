"""Learning rate by step."""

import math
from dataclasses import replace

import pytest

from trainer.config import Config, OptimizerConfig
from trainer.schedule import build_schedule


def schedule(steps_per_epoch: int = 10, **settings: object):  # type: ignore[no-untyped-def]
    optimizer = replace(OptimizerConfig(learning_rate=2.0, learning_rate_rule="fixed"), **settings)
    return build_schedule(replace(Config(), optimizer=optimizer), steps_per_epoch)


def test_warm_up_is_linear_from_zero() -> None:
    s = schedule(epochs=10, warmup_epochs=2.0)
    assert s.warmup_steps == 20
    assert [s.learning_rate(step) for step in (0, 5, 10, 19)] == [0.0, 0.5, 1.0, 1.9]
    assert s.learning_rate(20) == 2.0


def test_cosine_goes_from_the_peak_to_zero() -> None:
    s = schedule(epochs=10, warmup_steps=20)
    assert s.learning_rate(60) == pytest.approx(1.0)
    assert s.learning_rate(40) == pytest.approx(1 + math.cos(math.pi / 4))
    assert s.learning_rate(100) == pytest.approx(0.0)
    assert 0 < s.learning_rate(99) < 0.001


def test_drops_fall_at_epochs_before_the_end() -> None:
    s = schedule(epochs=100, schedule="drops", warmup_steps=3)
    assert s.total_steps == 1000
    assert [s.learning_rate(step) for step in (3, 499, 500, 749, 750, 999)] == pytest.approx(
        [2, 2, 0.4, 0.4, 0.08, 0.08]
    )


def test_imagenet_numbers() -> None:
    """REFERENCE 2: 4096 images a step, 100 epochs of 1,281,167 images, 10 epochs of warm-up, rate 6.4."""
    c = Config()
    c = replace(c, data=replace(c.data, images_per_step=4096), optimizer=replace(c.optimizer, warmup_epochs=10.0))
    s = build_schedule(c, 1281167 // 4096)
    assert (s.total_steps, s.warmup_steps, s.peak) == (31200, 3120, pytest.approx(6.4))
