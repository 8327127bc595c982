"""SimCLR method (Chen et al., ICML 2020): it pulls embeddings of the same image together and pushes others apart.

Shapes: R = d*N views of this rank (view-major), k embedding size.
"""

from __future__ import annotations

from torch import Tensor

from trainer.distributed.gather import gather_candidates
from trainer.distributed.ranks import ImageRange
from trainer.losses.contrastive import contrastive_loss
from trainer.methods.method import LossOutput, Method, MethodContext, without_checks
from trainer.models.networks import EncoderProjector, build_networks


class SimCLR(Method):
    """SimCLR with encoder and projector. Each rank compares its embeddings with those of all ranks."""

    def __init__(self, context: MethodContext) -> None:
        self.networks = build_networks(EncoderProjector, context)
        self._num_views = context.config.views.num_views
        self._settings = context.config.simclr
        self._loss_group = context.loss_group

    def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
        """Compute the contrastive loss. outputs: embeddings (R, k)."""
        candidates = outputs
        first_image = 0
        # The loss group is all ranks, so an image has the same number in the candidates as in the step.
        if self._loss_group is not None:
            candidates = gather_candidates(outputs, self._num_views, self._loss_group)
            first_image = images.first
        loss = self._settings.scale * contrastive_loss(
            outputs,
            candidates,
            num_views=self._num_views,
            temperature=self._settings.temperature,
            normalize=self._settings.normalize,
            first_image=first_image,
        )
        return without_checks(loss, outputs)
