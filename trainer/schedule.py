"""Learning rate as a function of the step. Epochs become steps here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import Config, peak_learning_rate


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0, then half a cosine to 0, or a constant that drops."""

    peak: float
    """Rate after the warm-up."""
    total_steps: int
    warmup_steps: int
    drop_steps: tuple[int, ...] | None
    """Steps from which on the rate is multiplied once more by drop_factor; None: cosine."""
    drop_factor: float

    def learning_rate(self, step: int) -> float:
        """The rate of the update that step `step` (from 0) makes."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.drop_steps is None:
            done = (step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
            return self.peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.peak * self.drop_factor ** sum(step >= drop for drop in self.drop_steps)


def side_steps(config: Config, steps_per_epoch: int) -> tuple[tuple[int, int], ...]:
    """(first step, side of the views from there on), rising from step 0."""
    v = config.views
    starts = [0, *(epoch * steps_per_epoch for epoch in v.early_side_epochs)]
    return tuple(zip(starts, [*v.early_sides, v.side], strict=True))


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
    )
