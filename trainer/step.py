"""One update, never waiting for the device: forward, loss, backward, agreement over ranks, optimizer.

Shapes: R = d*N rows of this rank (view-major), S pixels a side, k embedding size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from trainer.config.schema import LossConfig
from trainer.distributed.gather import gather_rows
from trainer.distributed.process_group import agree
from trainer.distributed.ranks import Ranks
from trainer.grad_scaler import LossScale
from trainer.losses.wmse import wmse_loss_with_status
from trainer.models.batch_norm import BatchNormStatistics
from trainer.optimizer import update
from trainer.run.faults import GRADIENT_FAULT, fault_code, fault_codes


class StepResult(NamedTuple):
    """What a step leaves on the device; the loop reads it later."""

    loss: Tensor  # 0-d float32, of this rank's slice group
    embeddings: Tensor  # (R, k) float32, without gradient
    min_pivot: Tensor  # 0-d, the smallest relative pivot of this rank's slices
    failed: Tensor  # 0-d bool, the same on all ranks: the update was not applied
    agreed: Tensor  # (3,) int32, the same on all ranks: what failed (`faults.fault_code`), stop and save asked for


class Computed(NamedTuple):
    """Of the whole step or, with accumulation, of one part of it."""

    loss: Tensor  # 0-d, without gradient
    embeddings: Tensor  # (rows, k), without gradient
    ok: Tensor  # (d, slices of a view) bool
    min_pivot: Tensor  # 0-d


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
        accumulation_steps: int = 1,
    ) -> None:
        """model: from `process_group.wrap_model`. autocast_dtype: None for float32 throughout; with float16 the loss is scaled.

        slice_group: process group whose rows are whitened together; None: this rank's own rows.
        accumulation_steps: parts of a rank's images, each of whole slices, that go through one after the other.
        """
        assert slice_group is None or accumulation_steps == 1, "a part would need the same part of its neighbours"
        self.model, self.optimizer, self.loss, self.num_views = model, optimizer, loss, num_views
        self.autocast_dtype, self.ranks, self.slice_group = autocast_dtype, ranks, slice_group
        self.accumulation_steps = accumulation_steps
        self.statistics = BatchNormStatistics(model)
        codes = fault_codes(num_views, ranks.rank, ranks.world_size)
        self.device = next(model.parameters()).device
        self.fault_codes = torch.tensor(codes, dtype=torch.int32, device=self.device)
        self.loss_scale = LossScale(self.device) if autocast_dtype == torch.float16 else None

    def __call__(
        self, pixels: Tensor, permutations: Tensor, learning_rate: float, *, stop: int = 0, save: bool = False
    ) -> StepResult:
        """pixels: (R, 3, S, S) uint8. permutations: (iterations, images of the slice group) int64, on the device.

        stop: how this rank was asked to stop (`signals`: GO_ON, PREEMPT or STOP). save: whether it wants the run to be saved.
        All ranks learn of both in the result.
        """
        self.statistics.remember()
        loss, embeddings, ok, min_pivot = self._gradients(pixels, permutations)
        with record_function("agree"):
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            fault = fault_code(ok, loss, gradients, self.fault_codes)
            agreed = agree(torch.stack([fault, fault.new_full((), stop), fault.new_full((), save)]), self.ranks)
            failed = agreed[0] > 0
        with record_function("update"):
            if self.loss_scale:
                self.loss_scale.unscale(gradients)
                self.loss_scale.update(agreed[0] == GRADIENT_FAULT)
            update(self.optimizer, learning_rate, failed)
            self.optimizer.zero_grad(set_to_none=True)
            self.statistics.restore_if(failed)
        return StepResult(loss, embeddings, min_pivot, failed, agreed)

    def _gradients(self, pixels: Tensor, permutations: Tensor) -> Computed:
        """Forward, loss and backward, part by part; ranks average their gradients during the last part's backward."""
        count = self.accumulation_steps
        if count == 1:
            return self._part(pixels, permutations)
        parts = []
        orders = split_orders(permutations, count)
        for number, rows in enumerate(split_images(pixels, self.num_views, count)):
            with self.model.no_sync() if number < count - 1 and self.ranks.world_size > 1 else nullcontext():  # type: ignore[operator]
                parts.append(self._part(rows, orders[number]))
        losses, embeddings, ok, pivots = zip(*parts, strict=True)
        by_view = torch.cat([e.unflatten(0, (self.num_views, -1)) for e in embeddings], dim=1)
        return Computed(
            torch.stack(losses).mean(), by_view.flatten(0, 1), torch.cat(ok, dim=1), torch.stack(pivots).min()
        )

    def _part(self, pixels: Tensor, permutations: Tensor) -> Computed:
        """Adds the gradients of these rows, over the number of parts, to those that are there."""
        with record_function("forward"), self._autocast():
            embeddings = self.model(pixels)
        with record_function("loss"):
            loss, ok, min_pivot = self._loss(embeddings, permutations)
            scaled = loss / self.accumulation_steps if self.accumulation_steps > 1 else loss
            scaled = scaled * self.loss_scale.scale if self.loss_scale else scaled
        with record_function("backward"), self.statistics.unchanged():
            scaled.backward()
        # CUDA graphs write the next embeddings over these
        return Computed(loss.detach(), embeddings.detach().clone(), ok.unflatten(0, (self.num_views, -1)), min_pivot)

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


def split_images(pixels: Tensor, num_views: int, count: int) -> list[Tensor]:
    """(R, 3, S, S) channels_last, view-major -> `count` of the same for consecutive images, each with all views of them."""
    by_view = pixels.permute(0, 2, 3, 1).unflatten(0, (num_views, -1))  # a copy keeps the order of its last dimensions
    return [part.flatten(0, 1).permute(0, 3, 1, 2) for part in by_view.chunk(count, dim=1)]


def split_orders(permutations: Tensor, count: int) -> list[Tensor]:
    """(iterations, images) -> `count` of (iterations, images of a part), counted from the part's first image; no order leaves
    its part, since a part holds whole blocks of permutation."""
    size = permutations.shape[1] // count
    return [part - number * size for number, part in enumerate(permutations.chunk(count, dim=1))]
