"""Skipped updates: which check failed (a fault code that all ranks agree on), how often, and warnings of a collapse.

All faults in the order of their codes, causes before consequences (a NaN of one rank reaches every rank's gradients):
    the method's checks of rank 0, of rank 1, ...
    the loss of rank 0, of rank 1, ...                 is not finite
    a gradient                                         is not finite
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.distributed.ranks import Ranks
from trainer.errors import DivergedError

GRADIENT_FAULT = 1  # code of a gradient that is not finite although the losses are finite and all checks passed
_log = logging.getLogger(__name__)
_COLLAPSE_FACTOR = 4  # a drop of the effective rank by this factor gives a warning


def fault_codes(num_checks: int, rank: int, world_size: int) -> list[int]:
    """Return the codes of a rank's faults: its checks, its loss, a gradient.

    Earlier faults in the order have higher codes."""
    # From the lowest code on: the gradient (1), the losses of the last to the first rank, then the checks likewise.
    highest_loss = 1 + world_size
    highest_check = highest_loss + world_size * num_checks
    first_check = highest_check - rank * num_checks
    checks = [first_check - check for check in range(num_checks)]
    return [*checks, highest_loss - rank, GRADIENT_FAULT]


def fault_code(ok: Tensor, loss: Tensor, gradients: list[Tensor], codes: Tensor) -> Tensor:
    """Return the code of this rank's first fault, 0-d int32 on the device; 0 if there is none.

    The maximum of all ranks' codes is the code of the first fault of all.

    ok: (checks,) bool, the method's checks. loss: 0-d. gradients: those of all parameters. codes: (checks + 2,) int32,
    `fault_codes` on the device.
    """
    # A norm is finite only if all elements are, so one kernel checks all norms and the loss.
    norms = torch._foreach_norm(gradients)
    finite = torch.stack([loss, *norms]).isfinite()
    loss_ok = finite[:1]
    gradients_ok = finite[1:].all()[None]
    passed = torch.cat([ok, loss_ok, gradients_ok])
    return torch.where(passed, 0, codes).max()


def describe_fault(code: int, checks: Sequence[str], world_size: int, group_size: int) -> str:
    """Describe the fault of a code above 0 in words.

    checks: descriptions of the method's checks (`Method.checks`). group_size: number of ranks in a loss group."""
    if code == GRADIENT_FAULT:
        return "a gradient is not finite, though the loss is"
    descriptions = [*checks, "the loss is not finite"]
    for rank in range(world_size):
        codes = fault_codes(len(checks), rank, world_size)
        if code in codes:
            # All ranks of a loss group fail together; name all of them.
            first = rank - rank % group_size
            who = f"rank {rank}" if group_size == 1 else f"ranks {first} to {first + group_size - 1}"
            return f"{who}: {descriptions[codes.index(code)]}"
    raise AssertionError(f"no fault has the code {code}")


class FaultCounter:
    """Counter of consecutive skipped updates, which ends the run if there are too many. Every rank has one; rank 0 logs."""

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
        """max_consecutive: skipped updates in a row that the run survives.

        checks: descriptions of the method's checks. remedy: advice of the method if they fail. group_size: number of
        ranks in a loss group. scales_loss: whether the step halves the loss scale after an overflow (`GradScaler`)."""
        self._max_consecutive = max_consecutive
        self._checks = checks
        self._ranks = ranks
        self._group_size = group_size
        self._scales_loss = scales_loss
        self._remedy = remedy
        self.consecutive = 0
        self._first_step = 0
        self._reason = ""
        self._made_progress = False

    def count(self, step: int, code: int) -> None:
        """Count the fault code of one step. Raises DivergedError if too many consecutive updates were skipped."""
        if not code:
            self.consecutive = 0
            self._made_progress = True
            return
        # A later message names the first of the skipped updates.
        if not self.consecutive:
            self._first_step = step
        self.consecutive += 1
        what = describe_fault(code, self._checks, self._ranks.world_size, self._group_size)
        self._reason = what
        if self._scales_loss and code == GRADIENT_FAULT:
            what += " (fp16: the loss scale was halved)"
            # The first fp16 steps search for the loss scale, and the checkpoint keeps it: that is progress.
            self._made_progress = True
        if self._ranks.is_first:
            _log.warning("step %d: %s; all ranks skipped the update (%d in a row)", step, what, self.consecutive)
        if self.consecutive > self._max_consecutive:
            raise DivergedError(
                f"the run skipped {self.consecutive} updates in a row (max_skipped_steps is {self._max_consecutive}), the last "
                f"in step {step}: {what}. {self._advice()}; the last good checkpoint is untouched",
                self._first_step,
                self._reason,
            )

    def check_progress(self) -> None:
        """Raise DivergedError if steps were counted and the update of every one was skipped."""
        if self.consecutive and not self._made_progress:
            raise DivergedError(
                f"the run skipped all {self.consecutive} updates: the model has learnt nothing and is not saved. "
                f"{self._advice()}",
                self._first_step,
                self._reason,
            )

    def _advice(self) -> str:
        options = ["a smaller optimizer.learning_rate", "a longer warm-up"]
        if self._remedy:
            options.append(self._remedy)
        options.append("or precision bf16 or fp32" if self._scales_loss else "or precision fp32")
        return f"The embeddings have collapsed or overflowed. Try {', '.join(options)}"


class CollapseWatch:
    """Watch on the effective rank of the embeddings, which warns when it falls below a quarter of its highest value."""

    def __init__(self) -> None:
        self._highest_rank = 0.0

    def warnings(self, effective_rank: float) -> list[str]:
        """Return the warnings about the effective rank of a logged line."""
        highest = self._highest_rank
        fell = effective_rank < highest / _COLLAPSE_FACTOR
        # After a warning the new value counts as the highest, so that a collapse is reported once. NaN fails both tests.
        if fell or effective_rank > highest:
            self._highest_rank = effective_rank
        if not fell:
            return []
        return [
            f"the effective rank of the embeddings fell from {highest:.1f} to {effective_rank:.1f}: they are about to "
            "collapse; a smaller optimizer.learning_rate or a longer warm-up helps"
        ]
