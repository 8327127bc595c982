"""Barlow Twins method (Zbontar et al., ICML 2021), with encoder and projector.

Shapes: R = d*N views of this rank (view-major), k embedding size.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from trainer.distributed.gather import sum_of_group
from trainer.distributed.ranks import ImageRange
from trainer.losses.barlow_twins import barlow_twins_loss
from trainer.methods.method import LossOutput, Method, MethodContext, without_checks
from trainer.models.networks import EncoderProjector, build_networks


class BarlowTwins(Method):
    """Barlow Twins. The correlation is that of the images of all ranks."""

    def __init__(self, context: MethodContext) -> None:
        self.networks = build_networks(EncoderProjector, context)
        self._config = context.config
        self._loss_group = context.loss_group

    def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
        """Compute the loss. outputs: embeddings (R, k)."""
        settings = self._config.barlow_twins
        # Every rank computes the same loss from sums over all ranks.
        loss = settings.scale * barlow_twins_loss(
            outputs,
            num_views=self._config.views.num_views,
            num_images=self._config.data.images_per_step,
            off_diagonal_weight=settings.off_diagonal_weight,
            sum_over_ranks=partial(sum_of_group, group=self._loss_group),
        )
        return without_checks(loss, outputs)
