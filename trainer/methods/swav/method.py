"""SwAV method (Caron et al., NeurIPS 2020): each view predicts the assignment of the other views to prototypes.

Shapes: R = d*N views of this rank (view-major), k embedding size, C prototypes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config.schema import Config
from trainer.distributed.gather import sum_of_group
from trainer.distributed.ranks import ImageRange
from trainer.losses.swapped import swapped_prediction_loss
from trainer.methods.method import LossOutput, Method, MethodContext, without_checks
from trainer.models.networks import EncoderProjector, build_networks


class SwAVOutput(NamedTuple):
    """Embeddings (R, k) and their scores (R, C), the cosines with the prototypes."""

    embeddings: Tensor
    scores: Tensor


class SwAVNetworks(EncoderProjector):
    """Encoder, projector and prototypes."""

    def __init__(self, config: Config, *batch_norm: Any) -> None:
        super().__init__(config, *batch_norm)
        self.prototypes = nn.Linear(config.model.embedding_size, config.swav.prototypes, bias=False)
        with torch.no_grad():
            self.prototypes.weight.copy_(functional.normalize(self.prototypes.weight, dim=1))

    def forward(self, pixels: Tensor) -> SwAVOutput:
        """Encode pixels (R, 3, S, S) uint8, channels_last, and compare them with the prototypes, which have length 1."""
        embeddings = self.embed(self.normalize(pixels))
        with torch.autocast(embeddings.device.type, enabled=False):
            # Normalised embeddings and prototypes make each score a cosine.
            scores = self.prototypes(functional.normalize(embeddings, dim=1))
        return SwAVOutput(embeddings, scores)


class SwAV(Method):
    """SwAV with encoder, projector and prototypes. The assignments balance the images of all ranks."""

    networks: SwAVNetworks

    def __init__(self, context: MethodContext) -> None:
        self.networks = build_networks(SwAVNetworks, context)
        self._num_views = context.config.views.num_views
        self._settings = context.config.swav
        self._loss_group = context.loss_group
        self._frozen: Tensor | None = None

    def loss(self, outputs: SwAVOutput, step: int, images: ImageRange) -> LossOutput:
        """Compute the swapped prediction of this rank's images."""
        settings = self._settings
        # Only small sums go over the ranks: each rank computes the loss of its own rows.
        loss = swapped_prediction_loss(
            outputs.scores,
            num_views=self._num_views,
            temperature=settings.temperature,
            epsilon=settings.epsilon,
            iterations=settings.sinkhorn_iterations,
            sum_over_ranks=partial(sum_of_group, group=self._loss_group),
        )
        return without_checks(loss, outputs.embeddings)

    def before_update(self, step: int) -> None:
        """Remember the prototypes in the first steps, which do not change them."""
        weight = self.networks.prototypes.weight
        self._frozen = None
        if step < self._settings.freeze_prototypes_steps:
            # Without a gradient at all they would have no moments, and a checkpoint is checked for those.
            weight.grad = torch.zeros_like(weight)
            self._frozen = weight.detach().clone()

    @torch.no_grad()
    def after_update(self, step: int, skipped: Tensor) -> None:
        """Scale the prototypes to length 1, or restore them in the first steps."""
        weight = self.networks.prototypes.weight
        if self._frozen is not None:
            weight.copy_(self._frozen)
            return
        # Even a row of length 1 changes its last bits, so a skipped update keeps the old one.
        weight.copy_(torch.where(skipped, weight, functional.normalize(weight, dim=1)))
