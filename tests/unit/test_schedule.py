"""Schedule of the learning rate, and the steps whose checkpoints are kept."""

import math
from dataclasses import replace

import pytest

from trainer.config.schema import CheckpointConfig, Config, OptimizerConfig
from trainer.schedule import build_schedule, evaluation_steps, kept_steps


def schedule(steps_per_epoch: int = 10, **settings: object):  # type: ignore[no-untyped-def]
    optimizer = replace(OptimizerConfig(learning_rate=2.0, learning_rate_rule="fixed"), **settings)
    return build_schedule(replace(Config(), optimizer=optimizer), steps_per_epoch)


def test_the_warm_up_is_linear_from_zero() -> None:
    s = schedule(epochs=10, warmup_epochs=2.0)
    assert s.warmup_steps == 20
    assert [s.learning_rate(step) for step in (0, 5, 10, 19)] == [0.0, 0.5, 1.0, 1.9]
    assert s.learning_rate(20) == 2.0


def test_the_warm_up_may_begin_at_the_first_step() -> None:
    """As in the authors' code, the learning rate of update i is the peak times (i + 1) / 500."""
    rates = {"zero": [0, 6e-6, 2.994e-3, 3e-3], "first_step": [6e-6, 1.2e-5, 3e-3, 3e-3]}
    for start, expected in rates.items():
        s = schedule(epochs=1000, schedule="drops", warmup_steps=500, learning_rate=3e-3, warmup_from=start)
        assert [s.learning_rate(step) for step in (0, 1, 499, 500)] == pytest.approx(expected, rel=1e-12)


def test_the_cosine_falls_from_the_peak_to_zero() -> None:
    s = schedule(epochs=10, warmup_steps=20)
    assert s.learning_rate(60) == pytest.approx(1.0)
    assert s.learning_rate(40) == pytest.approx(1 + math.cos(math.pi / 4))
    assert s.learning_rate(100) == pytest.approx(0.0)
    assert 0 < s.learning_rate(99) < 0.001


def test_the_rates_of_swav_are_exact_at_both_ends() -> None:
    """Warm-up from 0.3 to 4.8, and half a cosine to 0.0048."""
    rates = {"learning_rate": 4.8, "start_learning_rate": 0.3, "final_learning_rate": 0.0048}
    for start, last in (("zero", 0.3 + 4.5 * 99 / 100), ("first_step", 4.8)):
        s = schedule(epochs=40, warmup_epochs=10.0, warmup_from=start, **rates)
        assert s.learning_rate(0) == pytest.approx(0.3 if start == "zero" else 0.3 + 4.5 / 100, rel=1e-15)
        assert s.learning_rate(50) == pytest.approx(0.3 + 4.5 * (0.5 if start == "zero" else 0.51), rel=1e-14)
        assert s.learning_rate(99) == pytest.approx(last, rel=1e-15)
        assert s.learning_rate(100) == 4.8
        assert s.learning_rate(250) == pytest.approx((4.8 + 0.0048) / 2, rel=1e-14)
        assert s.learning_rate(300) == pytest.approx(0.0048 + 4.7952 * 0.25, rel=1e-14)
        assert s.learning_rate(400) == 0.0048
    assert schedule(epochs=40, warmup_epochs=10.0, **rates).learning_rate(0) == 0.3


def test_without_start_and_final_rates_the_schedule_is_the_former_one_bit_for_bit() -> None:
    """The recipes must not change by a rounding error."""
    for start in ("zero", "first_step"):
        s = schedule(epochs=37, warmup_steps=61, learning_rate=2.4 / 7, warmup_from=start)
        for step in range(s.total_steps + 1):
            if step < 61:
                expected = s.peak * (step + (start == "first_step")) / 61
            else:
                expected = s.peak * 0.5 * (1 + math.cos(math.pi * min((step - 61) / (s.total_steps - 61), 1.0)))
            assert s.learning_rate(step) == expected


def test_the_linear_rule_scales_all_rates_by_the_batch_size() -> None:
    c = Config()
    o = replace(c.optimizer, learning_rate=0.05, learning_rate_rule="linear", start_learning_rate=0.01, warmup_steps=2)
    c = replace(c, data=replace(c.data, images_per_step=512), optimizer=replace(o, final_learning_rate=0.002))
    s = build_schedule(c, 10)
    assert (s.start, s.peak, s.final) == (0.02, 0.1, 0.004)


def test_the_learning_rate_drops_at_epochs_before_the_end() -> None:
    s = schedule(epochs=100, schedule="drops", warmup_steps=3)
    assert s.total_steps == 1000
    assert [s.learning_rate(step) for step in (3, 499, 500, 749, 750, 999)] == pytest.approx(
        [2, 2, 0.4, 0.4, 0.08, 0.08]
    )


def test_the_schedule_of_the_imagenet_recipe() -> None:
    """The recipe has 4096 images a step, 100 epochs of 1,281,167 images, 10 epochs of warm-up, and the peak 6.4."""
    c = Config()
    c = replace(c, data=replace(c.data, images_per_step=4096), optimizer=replace(c.optimizer, warmup_epochs=10.0))
    s = build_schedule(c, 1281167 // 4096)
    assert (s.total_steps, s.warmup_steps, s.peak) == (31200, 3120, pytest.approx(6.4))


def curve(epochs: int, kind: str, **settings: int) -> Config:
    optimizer = replace(OptimizerConfig(), epochs=epochs, schedule=kind)
    return replace(Config(), optimizer=optimizer, checkpoint=replace(CheckpointConfig(), **settings))


def epochs_kept(config: Config) -> list[int]:
    """Return the epochs whose checkpoints are kept for the evaluation; an epoch has 10 steps."""
    steps = evaluation_steps(config, 10)
    found = [step for step in range(10 * config.optimizer.epochs + 11) if step in steps]
    assert all(step % 10 == 0 for step in found)
    return [step // 10 for step in found]


def test_checkpoints_for_the_curves_of_the_paper_are_kept() -> None:
    """They are kept every 20 epochs, and every 5 after the first drop, which is 50 epochs before the end."""
    every = {"keep_every_epochs": 20, "keep_every_epochs_after_drop": 5}
    assert epochs_kept(curve(1000, "drops", **every)) == [*range(20, 941, 20), *range(955, 1001, 5)]
    assert epochs_kept(curve(1000, "cosine", **every)) == list(range(20, 1001, 20))


def test_each_of_the_two_settings_works_alone() -> None:
    assert epochs_kept(curve(100, "drops")) == []
    assert epochs_kept(curve(100, "drops", keep_every_epochs=30)) == [30, 60, 90]
    assert epochs_kept(curve(100, "drops", keep_every_epochs_after_drop=20)) == [60, 80, 100]


def test_checkpoints_at_multiples_of_steps_are_kept_too() -> None:
    config = curve(10, "cosine", keep_every_epochs=4, keep_every_steps=35)
    assert [step for step in range(101) if step in kept_steps(config, 10)] == [35, 40, 70, 80]
    assert not any(step in kept_steps(curve(10, "cosine"), 10) for step in range(101))
