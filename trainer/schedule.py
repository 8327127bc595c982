"""Learning rate and kept checkpoints as functions of the step. Epochs become steps here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.config.schema import Config


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then half a cosine to 0, or a constant that drops."""

    peak: float
    """Rate after the warm-up."""
    total_steps: int
    warmup_steps: int
    drop_steps: tuple[int, ...] | None
    """Steps from which on the rate is multiplied once more by drop_factor; None: cosine."""
    drop_factor: float
    warmup_from: Literal["zero", "first_step"] = "zero"

    def learning_rate(self, step: int) -> float:
        """The rate of the update that step `step` (from 0) makes."""
        if step < self.warmup_steps:
            return self.peak * (step + (self.warmup_from == "first_step")) / self.warmup_steps
        if self.drop_steps is None:
            done = (step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
            return self.peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.peak * self.drop_factor ** sum(step >= drop for drop in self.drop_steps)


def size_steps(config: Config, steps_per_epoch: int) -> tuple[tuple[int, int], ...]:
    """(first step, size of the views from there on), rising from step 0."""
    v = config.views
    starts = [0, *(epoch * steps_per_epoch for epoch in v.early_size_epochs)]
    return tuple(zip(starts, [*v.early_sizes, v.size], strict=True))


class Steps:
    """The steps of some ranges. Not listed: a benchmark's endless run has more than fit into memory."""

    def __init__(self, *ranges: range) -> None:
        self.ranges = ranges

    def __contains__(self, step: object) -> bool:
        return any(step in steps for steps in self.ranges)


def evaluation_steps(config: Config, steps_per_epoch: int) -> Steps:
    """Steps at which a checkpoint is saved for the evaluation: the ends of the epochs that the config names."""
    c, o = config.checkpoint, config.optimizer
    drops = o.drop_epochs_before_end if o.schedule == "drops" else ()
    first_drop = (o.epochs - (drops[0] if drops else 0)) * steps_per_epoch
    before = c.keep_every_epochs * steps_per_epoch
    after = c.keep_every_epochs_after_drop * steps_per_epoch or before
    return Steps(_multiples(before, 0, first_drop), _multiples(after, first_drop, o.epochs * steps_per_epoch))


def kept_steps(config: Config, steps_per_epoch: int) -> Steps:
    """Steps whose checkpoint, once saved, is never deleted."""
    every = _multiples(config.checkpoint.keep_every_steps, 0, config.optimizer.epochs * steps_per_epoch)
    return Steps(*evaluation_steps(config, steps_per_epoch).ranges, every)


def _multiples(of: int, above: int, most: int) -> range:
    """The multiples of a number in above < n <= most; none of 0."""
    return range(of * (above // of + 1), most + 1, of) if of else range(0)


def build_schedule(config: Config, steps_per_epoch: int) -> Schedule:
    """The schedule of the whole run, whatever max_steps says."""
    o = config.optimizer
    drops = tuple((o.epochs - before) * steps_per_epoch for before in o.drop_epochs_before_end)
    return Schedule(
        peak=peak_learning_rate(config),
        total_steps=o.epochs * steps_per_epoch,
        warmup_steps=o.warmup_steps or round(o.warmup_epochs * steps_per_epoch),
        drop_steps=drops if o.schedule == "drops" else None,
        drop_factor=o.drop_factor,
        warmup_from=o.warmup_from,
    )


def peak_learning_rate(config: Config) -> float:
    """The rate after warm-up, by the config's rule."""
    o = config.optimizer
    return o.learning_rate * (math.sqrt(config.data.images_per_step) if o.learning_rate_rule == "sqrt" else 1.0)
