"""SimCLR method (Chen et al., ICML 2020): it pulls embeddings of the same image together and pushes others apart.

Shapes: R = d*N views of this rank (view-major), k embedding size.
"""

from __future__ import annotations

from torch import Tensor

from kernels.whitening import whiten_with_status
from trainer.distributed.gather import gather_candidates
from trainer.distributed.ranks import ImageRange
from trainer.losses.contrastive import contrastive_loss
from trainer.methods.method import LossOutput, Method, MethodContext, without_checks
from trainer.methods.wmse.method import WHITENING_METRICS, views_ok, whitening_checks
from trainer.models.networks import EncoderProjector, build_networks


class SimCLR(Method):
    """SimCLR with encoder and projector. Each rank compares its embeddings with those of all ranks.

    With `simclr.whiten` they are whitened before. Every rank then whitens the slices of all ranks, because a slice may lie on
    several ranks, and the negatives are whitened as well."""

    def __init__(self, context: MethodContext) -> None:
        self.networks = build_networks(EncoderProjector, context)
        self._num_views = context.config.views.num_views
        self._settings = context.config.simclr
        self._loss_group = context.loss_group
        # Only a whitening can fail.
        if self._settings.whiten:
            self.checks = whitening_checks(self._num_views)
            self.metrics = WHITENING_METRICS

    def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
        """Compute the contrastive loss. outputs: embeddings (R, k)."""
        rows = candidates = outputs
        first_image = 0
        # The loss group is all ranks, so an image has the same number in the candidates as in the step.
        if self._loss_group is not None:
            candidates = gather_candidates(outputs, self._num_views, self._loss_group)
            first_image = images.first
        if self._settings.whiten:
            slices = candidates.view(-1, self._settings.slice_size, candidates.shape[1])
            z, status = whiten_with_status(slices)
            candidates = z.flatten(0, 1)
            # The local rows of each view.
            by_view = candidates.unflatten(0, (self._num_views, -1))
            rows = by_view[:, first_image : first_image + images.count].flatten(0, 1)
        loss = self._settings.scale * contrastive_loss(
            rows,
            candidates,
            num_views=self._num_views,
            temperature=self._settings.temperature,
            normalize=self._settings.normalize,
            first_image=first_image,
        )
        if not self._settings.whiten:
            return without_checks(loss, outputs)
        return LossOutput(loss, views_ok(status, self._num_views), {"min_pivot": status.min_pivot.min()}, outputs)
