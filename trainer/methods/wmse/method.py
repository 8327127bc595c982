"""W-MSE method (Ermolov et al., ICML 2021, section 3): embeddings are whitened slice by slice, then views are compared.

Shapes: R = d*N views of this rank or micro-batch (view-major), k embedding size, I slicing iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.whitening import WhiteningStatus
from trainer.data.plan import slice_permutations
from trainer.distributed.gather import gather_rows
from trainer.distributed.ranks import ImageRange
from trainer.losses.wmse import wmse_loss_with_status
from trainer.methods.method import LossOutput, Method, MethodContext
from trainer.metric import Metric
from trainer.models.networks import EncoderProjector, build_networks

_LOW_PIVOT = 1e-4  # slices fail near 2e-6; the demo's first steps have 0.1


WHITENING_METRICS = MappingProxyType({"min_pivot": Metric("health", "min pivot {:.1e}", over="min")})


def whitening_checks(num_views: int) -> tuple[str, ...]:
    """Return the checks of a method that whitens slices of each view, whose results `views_ok` gives."""
    return tuple(f"a slice of view {view} cannot be whitened" for view in range(num_views))


def views_ok(status: WhiteningStatus, num_views: int) -> Tensor:
    """Return whether all slices of each view could be whitened, (num_views,) bool. status: of slices ordered by view."""
    return status.ok.unflatten(0, (num_views, -1)).all(1)


class WMSE(Method):
    """W-MSE with encoder and projector. Each loss group computes the loss of the slices of its images."""

    metrics = WHITENING_METRICS
    remedy = "wmse.eps 1e-4"

    def __init__(self, context: MethodContext) -> None:
        self.networks = build_networks(EncoderProjector, context)
        self.checks = whitening_checks(context.config.views.num_views)
        self._config = context.config
        self._device = context.device
        self._loss_group = context.loss_group
        self._identity = torch.zeros(0, dtype=torch.int64, device=context.device)
        # A dimension of low variance is no problem where dimensions are not decorrelated.
        self._pivot_to_warn = _LOW_PIVOT if context.config.wmse.whitening != "standardise" else 0.0

    def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
        """Compute the W-MSE loss. outputs: embeddings (R, k)."""
        settings = self._config.wmse
        num_views = self._config.views.num_views
        # Every rank of a loss group computes the loss of all its images.
        rows = outputs
        if self._loss_group is not None:
            rows = gather_rows(outputs, num_views, self._loss_group)
            images = images.group(self._loss_group.size())
        loss, status = wmse_loss_with_status(
            rows,
            num_views=num_views,
            slice_size=settings.slice_size,
            iterations=settings.iterations,
            normalize=settings.normalize,
            permutations=self.permutations(step, images),
            eps=settings.eps,
            backend=settings.backend,
            cholesky_float64=settings.cholesky_float64,
            whitening=settings.whitening,
        )
        return LossOutput(loss, views_ok(status, num_views), {"min_pivot": status.min_pivot.min()}, outputs)

    def permutations(self, step: int, images: ImageRange) -> Tensor:
        """Return the orders in which `images` of a step are cut into slices, (I, images) int64, on the device."""
        settings = self._config.wmse
        # The only order is then the identity, which stays on the device from step to step.
        if settings.iterations == 1:
            if len(self._identity) != images.count:
                self._identity = torch.arange(images.count, device=self._device)
            return self._identity[None]
        orders = slice_permutations(
            self._config.seed,
            step,
            self._config.data.images_per_step,
            settings.iterations,
            settings.permutation_block,
        )
        # Blocks are never split over loss groups, so these columns permute the given images among themselves.
        columns = orders[:, images.first : images.first + images.count]
        permutations = torch.from_numpy(columns - images.first)
        if self._device.type == "cuda":
            permutations = permutations.pin_memory()  # a copy from pageable memory would wait for the device
        return permutations.to(self._device, non_blocking=True)

    def health_warnings(self, values: Mapping[str, float]) -> list[str]:
        """Warn if the smallest pivot is low, and again each time it falls to a tenth of that.

        A pivot of 0 belongs to a slice that failed, whose step counts as a skipped update."""
        min_pivot = values["min_pivot"]
        if not 0 < min_pivot < self._pivot_to_warn:
            return []
        self._pivot_to_warn = min_pivot / 10
        return [
            f"the smallest pivot of the whitening is {min_pivot:.1e} of the mean variance (slices fail near 2e-6): the "
            "embeddings are about to collapse; lower optimizer.learning_rate, or set wmse.eps to 1e-4"
        ]
