"""Skipped updates: which check failed (a fault code that all ranks agree on), how often, and warnings of a collapse.

All faults in the order of their codes, causes before consequences (a NaN of one rank reaches every rank's gradients):
    the method's checks of rank 0, of rank 1, ...
    the loss of rank 0, of rank 1, ...                 is not finite
    a gradient                                         is not finite
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.distributed.ranks import Ranks
from trainer.errors import DivergedError

GRADIENT_FAULT = 1  # code of a gradient that is not finite although the losses are finite and all checks passed
_log = logging.getLogger(__name__)
_LOW_RANK = 1.75  # effective rank of embeddings of which one direction holds three quarters of the variance
_LOW_STEPS = 30  # healthy runs of the demo had less for at most 22 steps
_RECOVERY = 1.25
_RANKME_FACTOR = 8  # healthy runs: at most 6
_HIGH_CONDITION = 1e7  # healthy runs: at most 1.1e6
_REMEDY = "a smaller optimizer.learning_rate or a longer warm-up may help"


def fault_codes(num_checks: int, rank: int, world_size: int) -> list[int]:
    """Return the codes of a rank's faults: its checks, its loss, a gradient.

    Earlier faults in the order have higher codes."""
    # From the lowest code on: the gradient (1), the losses of the last to the first rank, then the checks likewise.
    highest_loss = 1 + world_size
    highest_check = highest_loss + world_size * num_checks
    first_check = highest_check - rank * num_checks
    checks = [first_check - check for check in range(num_checks)]
    return [*checks, highest_loss - rank, GRADIENT_FAULT]


def fault_code(ok: Tensor, loss: Tensor, norms: list[Tensor], codes: Tensor) -> Tensor:
    """Return the code of this rank's first fault, 0-d int32 on the device; 0 if there is none.

    The maximum of all ranks' codes is the code of the first fault of all.

    ok: (checks,) bool, the method's checks. loss: 0-d. norms: numbers (0-d) that are finite only if all gradients are, see
    `optimizer.gradient_norms`. codes: (checks + 2,) int32, `fault_codes` on the device.
    """
    # One kernel checks all norms and the loss.
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
    """Watch on the embeddings, which warns of each sign of a collapse once.

    The rules warned of every planted collapse, and in no healthy run (benchmarks/results/README.md)."""

    def __init__(self) -> None:
        self._highest_rankme = 0.0
        self._low_since: float | None = None  # step from which on the effective rank has been low
        self._lowest_rank = math.inf  # since then
        self._reported: set[str] = set()

    def warnings(self, line: Mapping[str, float]) -> list[str]:
        """Return the warnings about the embeddings of a logged line. A value that is not known is NaN."""
        new = {sign: text for sign, text in self._signs(line).items() if sign not in self._reported}
        self._reported |= new.keys()
        return [f"{text}: they collapse; {_REMEDY}" for text in new.values()]

    def _signs(self, line: Mapping[str, float]) -> dict[str, str]:
        """Describe the signs of a collapse in a line, by name."""
        signs = {}
        if self._stays_low(line["step"], line["effective_rank"]):
            steps = f"steps {self._low_since} to {line['step']}"
            signs["rank"] = f"the embeddings lie near a line (effective rank {line['effective_rank']:.2f}, {steps})"
        # The effective rank does not see a constant that all embeddings share, because it is that of their differences.
        rankme = line["rankme"]
        highest = self._highest_rankme
        if rankme < highest / _RANKME_FACTOR:
            signs["rankme"] = f"RankMe of the embeddings fell from {highest:.1f} to {rankme:.1f}"
        if rankme > highest:
            self._highest_rankme = rankme
        if line["condition"] > _HIGH_CONDITION:
            number = f"condition number {line['condition']:.1e}"
            signs["condition"] = f"the embeddings of view {line['condition_view']} have lost directions ({number})"
        return signs

    def _stays_low(self, step: float, rank: float) -> bool:
        """Return whether the effective rank has been low for some time without recovering."""
        # MoCo and Barlow Twins pass through such values in their first steps. NaN counts as recovered.
        if not rank < _LOW_RANK:
            self._low_since = None
            self._lowest_rank = math.inf
            return False
        if self._low_since is None:
            self._low_since = step
        self._lowest_rank = min(self._lowest_rank, rank)
        return step - self._low_since >= _LOW_STEPS and rank <= _RECOVERY * self._lowest_rank
