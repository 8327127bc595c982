"""SimCLR method (Chen et al., ICML 2020): it pulls embeddings of the same image together and pushes others apart.

Shapes: R = d*N views of this rank (view-major), k embedding size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.whitening import whiten_with_status
from trainer.config.schema import Config
from trainer.distributed.gather import gather_candidates
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.losses.contrastive import contrastive_loss
from trainer.methods.method import LossOutput, Method
from trainer.methods.wmse.method import WHITENING_METRICS, views_ok, whitening_checks
from trainer.models.networks import build_encoder_projector


class SimCLR(Method):
    """SimCLR with encoder and projector. Each rank compares its embeddings with those of all ranks.

    With `simclr.whiten` they are whitened before. Every rank then whitens the slices of all ranks, because a slice may lie on
    several ranks, and the negatives are whitened as well."""

    def __init__(
        self, config: Config, ranks: Ranks, device: torch.device, loss_group: Any, batch_norm_group: str | None
    ) -> None:
        """See `MethodSettings.build`."""
        self.networks = build_encoder_projector(config, ranks, batch_norm_group).to(device)
        self._num_views = config.views.num_views
        self._settings = config.simclr
        self._loss_group = loss_group
        if config.simclr.whiten:
            self.checks = whitening_checks(config.views.num_views)
            self.metrics = WHITENING_METRICS

    def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
        """Compute the contrastive loss. outputs: embeddings (R, k)."""
        rows = candidates = outputs
        first_image = 0
        ok = torch.ones(0, dtype=torch.bool, device=outputs.device)
        metrics = {}
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
            ok = views_ok(status, self._num_views)
            metrics = {"min_pivot": status.min_pivot.min()}
        loss = contrastive_loss(
            rows,
            candidates,
            num_views=self._num_views,
            temperature=self._settings.temperature,
            normalize=self._settings.normalize,
            first_image=first_image,
        )
        return LossOutput(loss, ok, metrics, outputs)
