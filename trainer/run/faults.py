"""Failed steps: what failed, as one integer that all ranks agree on, how often, and warnings before it happens.

All faults in order, causes before consequences (a NaN of one rank is in every rank's gradients):
    rank 0's slices of view 0 .. d-1, rank 1's, ...    one could not be whitened
    rank 0's loss, rank 1's, ...                       not finite
    a gradient                                         not finite
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from trainer.distributed.ranks import Ranks
from trainer.errors import TrainingFailedError

GRADIENT_FAULT = 1  # the code of a gradient that is not finite though losses and slices are sound
_log = logging.getLogger(__name__)
_LOW_PIVOT = 1e-4  # slices fail near 2e-6; the demo's first steps have 0.1
_LOW_RANK = 4  # the effective rank has fallen by this factor


def fault_codes(num_views: int, rank: int, world_size: int) -> list[int]:
    """Return the codes of a rank's faults: its views' slices, its loss, a gradient. Earlier faults have higher codes."""
    losses, slices = 1 + world_size, 1 + world_size + world_size * num_views
    return [slices - rank * num_views - view for view in range(num_views)] + [losses - rank, GRADIENT_FAULT]


def fault_code(ok: Tensor, loss: Tensor, gradients: list[Tensor], codes: Tensor) -> Tensor:
    """Return the code of this rank's first fault, 0-d int32 on the device; 0 if there is none. The largest over all ranks is
    the code of the first fault of all.

    ok: (d, slices of a view) bool. loss: 0-d. gradients: of all parameters. codes: (d + 2,)
    int32, `fault_codes` on the device.
    """
    finite = torch.stack([loss, *torch._foreach_norm(gradients)]).isfinite()
    sound = torch.cat([ok.all(1), finite[:1], finite[1:].all()[None]])
    return torch.where(sound, 0, codes).max()


def describe_fault(code: int, num_views: int, world_size: int, group_size: int) -> str:
    """Describe the fault of a code above 0. group_size: ranks whose rows are whitened together."""
    if code == GRADIENT_FAULT:
        return "a gradient is not finite, though the loss is"
    for rank in range(world_size):
        codes = fault_codes(num_views, rank, world_size)
        if code in codes:
            who = f"rank {rank}" if group_size == 1 else f"ranks {rank} to {rank + group_size - 1}"
            kind = codes.index(code)
            what = "the loss is not finite" if kind == num_views else f"a slice of view {kind} can't be whitened"
            return f"{who}: {what}"
    raise AssertionError(f"no fault has the code {code}")


class FaultCounter:
    """Counts consecutive steps whose update was left out, on every rank, and ends the run if there are too many. The first rank
    logs each with its fault."""

    def __init__(self, most: int, num_views: int, ranks: Ranks, group_size: int, *, scales_loss: bool = False) -> None:
        """scales_loss: whether a step answers a gradient's overflow by a smaller `LossScale`."""
        self._most, self._num_views, self._ranks, self._group_size = most, num_views, ranks, group_size
        self._scales_loss = scales_loss
        self.in_a_row = 0
        self._made_progress = False

    def count(self, step: int, code: int) -> None:
        """Count one step's code. Raises TrainingFailedError if too many steps in a row failed."""
        self.in_a_row = self.in_a_row + 1 if code else 0
        if not code:
            self._made_progress = True
            return
        what = describe_fault(code, self._num_views, self._ranks.world_size, self._group_size)
        if self._scales_loss and code == GRADIENT_FAULT:
            what += " (fp16: the loss scale was halved)"
            self._made_progress = True  # the first fp16 steps search for the loss scale, which the checkpoint keeps
        if self._ranks.is_first:
            _log.warning("step %d: %s; no update was made on any rank (%d in a row)", step, what, self.in_a_row)
        if self.in_a_row > self._most:
            raise TrainingFailedError(
                f"{self.in_a_row} steps in a row failed (loss.max_failed_steps {self._most}), the last {step}: {what}. "
                f"{self._advice()}; the last good checkpoint is untouched"
            )

    def check_progress(self) -> None:
        """Raises TrainingFailedError if steps were counted and all of them failed."""
        if self.in_a_row and not self._made_progress:
            raise TrainingFailedError(
                f"all {self.in_a_row} steps of the run failed: nothing was learnt, and nothing is saved. {self._advice()}"
            )

    def _advice(self) -> str:
        precision = "bf16 or fp32" if self._scales_loss else "fp32"
        return (
            "The embeddings have collapsed or overflowed. Try a smaller optimizer.learning_rate, a longer warm-up, loss.eps "
            f"1e-4, or precision {precision}"
        )


class CollapseWatch:
    """Warns when the embeddings lose dimensions, before a slice fails: by the smallest pivot and the effective rank."""

    def __init__(self) -> None:
        self._pivot_to_warn, self._highest_rank = _LOW_PIVOT, 0.0

    def see(self, step: int, min_pivot: float, effective_rank: float) -> None:
        """Check a logged line's values. A pivot of 0 belongs to a failed slice, which FaultCounter logs."""
        if 0 < min_pivot < self._pivot_to_warn:
            self._pivot_to_warn = min_pivot / 10  # warn again when it is a tenth of this
            _log.warning(
                "step %d: the smallest pivot of the whitening is %.1e of the mean variance (slices fail near 2e-6): the "
                "embeddings are about to collapse; a smaller optimizer.learning_rate or loss.eps 1e-4 helps",
                step,
                min_pivot,
            )
        if effective_rank < self._highest_rank / _LOW_RANK:
            _log.warning(
                "step %d: the effective rank of the embeddings fell from %.1f to %.1f: they are about to collapse; a smaller "
                "optimizer.learning_rate or a longer warm-up helps",
                step,
                self._highest_rank,
                effective_rank,
            )
            self._highest_rank = effective_rank
        if effective_rank > self._highest_rank:  # false for NaN
            self._highest_rank = effective_rank
