"""One update, never waiting for the device: forward, loss, backward, agreement over ranks, optimizer.

Shapes: R = d*N rows of this rank (view-major), S pixels a side, k embedding size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from trainer.batch_norm import BatchNormStatistics
from trainer.config import LossConfig
from trainer.distributed import Ranks, agree
from trainer.faults import fault_code, fault_codes
from trainer.losses.gather import gather_rows
from trainer.losses.wmse import wmse_loss_with_status
from trainer.optimizer import update


class StepResult(NamedTuple):
    """What a step leaves on the device; the loop reads it later."""

    loss: Tensor  # 0-d float32, of this rank's slice group
    embeddings: Tensor  # (R, k) float32, without gradient
    min_pivot: Tensor  # 0-d, the smallest relative pivot of this rank's slices
    failed: Tensor  # 0-d bool, the same on all ranks: the update was not applied
    agreed: Tensor  # (3,) int32, the same on all ranks: what failed (`faults.fault_code`), stop and save asked for


class TrainStep:
    """The parts of a step, held together. Call it once a step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossConfig,
        *,
        num_views: int,
        autocast_dtype: torch.dtype | None,
        ranks: Ranks,
        slice_group: Any = None,
    ) -> None:
        """model: from `distributed.wrap_model`. autocast_dtype: None for float32 throughout.

        slice_group: process group whose rows are whitened together; None: this rank's own rows.
        """
        self.model, self.optimizer, self.loss, self.num_views = model, optimizer, loss, num_views
        self.autocast_dtype, self.ranks, self.slice_group = autocast_dtype, ranks, slice_group
        self.statistics = BatchNormStatistics(model)
        codes = fault_codes(num_views, ranks.rank, ranks.world_size)
        self.device = next(model.parameters()).device
        self.fault_codes = torch.tensor(codes, dtype=torch.int32, device=self.device)

    def __call__(
        self, pixels: Tensor, permutations: Tensor, learning_rate: float, *, stop: bool = False, save: bool = False
    ) -> StepResult:
        """pixels: (R, 3, S, S) uint8. permutations: (iterations, images of the slice group) int64, on the device.

        stop, save: whether this rank wants the run to stop, or to be saved; all ranks learn of it in the result.
        """
        self.statistics.remember()
        with record_function("forward"), self._autocast():
            embeddings = self.model(pixels)
        with record_function("loss"):
            loss, ok, min_pivot = self._loss(embeddings, permutations)
        with record_function("backward"):
            loss.backward()
        with record_function("agree"):
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            fault = fault_code(ok, loss.detach(), gradients, self.fault_codes)
            agreed = agree(torch.stack([fault, fault.new_full((), stop), fault.new_full((), save)]), self.ranks)
            failed = agreed[0] > 0
        with record_function("update"):
            update(self.optimizer, learning_rate, failed)
            self.optimizer.zero_grad(set_to_none=True)
            self.statistics.restore_if(failed)
        return StepResult(loss.detach(), embeddings.detach(), min_pivot, failed, agreed)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def _loss(self, embeddings: Tensor, permutations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss (0-d), which slices were whitened (slices,), view-major, and their smallest pivot (0-d)."""
        together = embeddings
        if self.slice_group is not None:
            together = gather_rows(embeddings, self.num_views, self.slice_group)
        c = self.loss
        loss, status = wmse_loss_with_status(
            together,
            num_views=self.num_views,
            slice_size=c.slice_size,
            iterations=c.iterations,
            normalize=c.normalize,
            permutations=permutations,
            eps=c.eps,
            backend=c.backend,
            float64_factor=c.float64_factor,
        )
        return loss, status.ok, status.min_pivot.min()
