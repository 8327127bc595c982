"""Learning rate, size of the views and kept checkpoints as functions of the step. Only this module converts epochs to steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.config.schema import Config


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then half a cosine, or a constant that drops."""

    peak: float
    """Learning rate after the warm-up."""
    total_steps: int
    warmup_steps: int
    drop_steps: tuple[int, ...] | None
    """Steps from which the learning rate is multiplied once more by drop_factor. None: cosine."""
    drop_factor: float
    warmup_from: Literal["zero", "first_step"] = "zero"
    start: float = 0.0
    """Learning rate from which the warm-up starts."""
    final: float = 0.0
    """Learning rate at which the cosine ends."""

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the update in step `step`, counted from 0."""
        if step < self.warmup_steps:
            # With "zero" the first update has the learning rate `start`, with "first_step" the first share of the way.
            shares = step + 1 if self.warmup_from == "first_step" else step
            return self.start * (1 - shares / self.warmup_steps) + self.peak * shares / self.warmup_steps
        if self.drop_steps is None:
            # Half a cosine, from the end of the warm-up to the end of the run.
            steps_after_warmup = max(self.total_steps - self.warmup_steps, 1)
            done = (step - self.warmup_steps) / steps_after_warmup
            angle = math.pi * min(done, 1.0)
            share = 0.5 * (1 + math.cos(angle))
            # In this form both ends are exact.
            return self.peak * share + self.final * (1 - share)
        num_drops = sum(step >= drop for drop in self.drop_steps)
        return self.peak * self.drop_factor**num_drops


def size_steps(config: Config, steps_per_epoch: int) -> tuple[tuple[int, int], ...]:
    """Return (first step, size of the views from then on) for each size, in the order of steps, which begin at 0."""
    v = config.views
    # The epoch of an early size is its end, and so the start of the next size.
    starts = [0, *(epoch * steps_per_epoch for epoch in v.early_size_epochs)]
    sizes = [*v.early_sizes, v.size]
    return tuple(zip(starts, sizes, strict=True))


class Steps:
    """The steps of several ranges. They are not listed: a benchmark's endless run has more than memory holds."""

    def __init__(self, *ranges: range) -> None:
        self.ranges = ranges

    def __contains__(self, step: object) -> bool:
        return any(step in steps for steps in self.ranges)


def evaluation_steps(config: Config, steps_per_epoch: int) -> Steps:
    """Return the steps at which a checkpoint is saved for the evaluation: the ends of the epochs that the config names."""
    optimizer = config.optimizer
    last_step = optimizer.epochs * steps_per_epoch
    # Without drops, the whole run counts as the time before the first drop.
    first_drop = last_step
    if optimizer.schedule == "drops" and optimizer.drop_epochs_before_end:
        first_drop -= optimizer.drop_epochs_before_end[0] * steps_per_epoch
    # The curve has more points after the first drop, where the accuracy rises fast.
    before = config.checkpoint.keep_every_epochs * steps_per_epoch
    after = config.checkpoint.keep_every_epochs_after_drop * steps_per_epoch or before
    return Steps(_multiples(before, 0, first_drop), _multiples(after, first_drop, last_step))


def kept_steps(config: Config, steps_per_epoch: int) -> Steps:
    """Return the steps whose checkpoints are never deleted."""
    every = _multiples(config.checkpoint.keep_every_steps, 0, config.optimizer.epochs * steps_per_epoch)
    return Steps(*evaluation_steps(config, steps_per_epoch).ranges, every)


def _multiples(of: int, above: int, most: int) -> range:
    """Return the multiples of a number with above < n <= most; none if it is 0."""
    if of == 0:
        return range(0)
    first = of * (above // of + 1)
    return range(first, most + 1, of)


def build_schedule(config: Config, steps_per_epoch: int) -> Schedule:
    """Build the schedule of the whole run, which does not depend on max_steps."""
    o = config.optimizer
    # A config sets at most one of warmup_steps and warmup_epochs; the other is 0.
    # Drops are given from the end, so that a longer run has its drops as near to the end.
    drops = tuple((o.epochs - before) * steps_per_epoch for before in o.drop_epochs_before_end)
    return Schedule(
        peak=peak_learning_rate(config),
        total_steps=o.epochs * steps_per_epoch,
        warmup_steps=o.warmup_steps or round(o.warmup_epochs * steps_per_epoch),
        drop_steps=drops if o.schedule == "drops" else None,
        drop_factor=o.drop_factor,
        warmup_from=o.warmup_from,
        start=o.start_learning_rate * rate_factor(config),
        final=o.final_learning_rate * rate_factor(config),
    )


def peak_learning_rate(config: Config) -> float:
    """Return the learning rate after the warm-up, by optimizer.learning_rate_rule."""
    return config.optimizer.learning_rate * rate_factor(config)


def rate_factor(config: Config) -> float:
    """Return the factor by which optimizer.learning_rate_rule scales all learning rates."""
    images = config.data.images_per_step
    factors = {"fixed": 1.0, "sqrt": math.sqrt(images), "linear": images / 256}
    return factors[config.optimizer.learning_rate_rule]
