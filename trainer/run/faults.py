"""Skipped updates: what failed, as one integer that all ranks agree on, how often, and warnings before it happens.

All faults in order, causes before consequences (a NaN of one rank is in every rank's gradients):
    rank 0's checks of the method, rank 1's, ...
    rank 0's loss, rank 1's, ...                       not finite
    a gradient                                         not finite
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.distributed.ranks import Ranks
from trainer.errors import TrainingFailedError

GRADIENT_FAULT = 1  # the code of a gradient that is not finite though losses and slices are sound
_log = logging.getLogger(__name__)
_LOW_RANK = 4  # the effective rank has fallen by this factor


def fault_codes(num_checks: int, rank: int, world_size: int) -> list[int]:
    """Return the codes of a rank's faults: its checks, its loss, a gradient. Earlier faults have higher codes."""
    losses = 1 + world_size
    checks = losses + world_size * num_checks
    return [checks - rank * num_checks - check for check in range(num_checks)] + [losses - rank, GRADIENT_FAULT]


def fault_code(ok: Tensor, loss: Tensor, gradients: list[Tensor], codes: Tensor) -> Tensor:
    """Return the code of this rank's first fault, 0-d int32 on the device; 0 if there is none. The largest over all ranks is
    the code of the first fault of all.

    ok: (checks,) bool. loss: 0-d. gradients: of all parameters. codes: (checks + 2,) int32, `fault_codes` on the device.
    """
    finite = torch.stack([loss, *torch._foreach_norm(gradients)]).isfinite()
    sound = torch.cat([ok, finite[:1], finite[1:].all()[None]])
    return torch.where(sound, 0, codes).max()


def describe_fault(code: int, checks: Sequence[str], world_size: int, group_size: int) -> str:
    """Describe the fault of a code above 0.

    checks: what may fail, as `Method.checks`. group_size: ranks that compute their loss together."""
    if code == GRADIENT_FAULT:
        return "a gradient is not finite, though the loss is"
    for rank in range(world_size):
        codes = fault_codes(len(checks), rank, world_size)
        if code in codes:
            first = rank - rank % group_size
            who = f"rank {rank}" if group_size == 1 else f"ranks {first} to {first + group_size - 1}"
            return f"{who}: {[*checks, 'the loss is not finite'][codes.index(code)]}"
    raise AssertionError(f"no fault has the code {code}")


class FaultCounter:
    """Counts consecutive skipped updates on every rank, and ends the run if there are too many. Rank 0 logs each."""

    def __init__(
        self,
        max_consecutive: int,
        checks: Sequence[str],
        ranks: Ranks,
        group_size: int = 1,
        *,
        scales_loss: bool = False,
        remedy: str = "",
    ) -> None:
        """checks, remedy: of the method. group_size: ranks that compute their loss together.

        scales_loss: whether a step answers a gradient's overflow by a smaller scale (`GradScaler`)."""
        self._max_consecutive = max_consecutive
        self._checks = checks
        self._ranks = ranks
        self._group_size = group_size
        self._scales_loss = scales_loss
        self._remedy = remedy
        self.consecutive = 0
        self._made_progress = False

    def count(self, step: int, code: int) -> None:
        """Count one step's code. Raises TrainingFailedError if too many consecutive updates were skipped."""
        self.consecutive = self.consecutive + 1 if code else 0
        if not code:
            self._made_progress = True
            return
        what = describe_fault(code, self._checks, self._ranks.world_size, self._group_size)
        if self._scales_loss and code == GRADIENT_FAULT:
            what += " (fp16: the loss scale was halved)"
            self._made_progress = True  # the first fp16 steps search for the loss scale, which the checkpoint keeps
        if self._ranks.is_first:
            _log.warning("step %d: %s; no update was made on any rank (%d in a row)", step, what, self.consecutive)
        if self.consecutive > self._max_consecutive:
            raise TrainingFailedError(
                f"{self.consecutive} steps in a row failed (max_skipped_steps {self._max_consecutive}), the last {step}: "
                f"{what}. {self._advice()}; the last good checkpoint is untouched"
            )

    def check_progress(self) -> None:
        """Raise TrainingFailedError if steps were counted and the update of every one was skipped."""
        if self.consecutive and not self._made_progress:
            raise TrainingFailedError(
                f"all {self.consecutive} steps of the run failed: nothing was learnt, and nothing is saved. {self._advice()}"
            )

    def _advice(self) -> str:
        options = [
            "a smaller optimizer.learning_rate",
            "a longer warm-up",
            *filter(None, [self._remedy]),
            f"or precision {'bf16 or fp32' if self._scales_loss else 'fp32'}",
        ]
        return f"The embeddings have collapsed or overflowed. Try {', '.join(options)}"


class CollapseWatch:
    """Warns when the embeddings lose dimensions: when their effective rank falls to a quarter of its highest value."""

    def __init__(self) -> None:
        self._highest_rank = 0.0

    def warnings(self, effective_rank: float) -> list[str]:
        """Return the warnings about the effective rank of a logged line."""
        highest, fell = self._highest_rank, effective_rank < self._highest_rank / _LOW_RANK
        if fell or effective_rank > highest:  # both false for NaN
            self._highest_rank = effective_rank
        if not fell:
            return []
        return [
            f"the effective rank of the embeddings fell from {highest:.1f} to {effective_rank:.1f}: they are about to "
            "collapse; a smaller optimizer.learning_rate or a longer warm-up helps"
        ]
