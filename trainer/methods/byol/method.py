"""BYOL method (Grill et al., NeurIPS 2020): each view predicts what a target network makes of the other views.

Shapes: R = d*N views of this rank or micro-batch (view-major), k embedding size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from trainer.config.schema import Config
from trainer.distributed.ranks import ImageRange
from trainer.losses.regression import regression_loss
from trainer.methods.method import LossOutput, Method, MethodContext, without_checks
from trainer.models.networks import EncoderPredictor, build_networks
from trainer.models.target import TargetNetwork, cosine_momentum


class BYOLOutput(NamedTuple):
    """Embeddings of a batch of views, (R, k) each."""

    embeddings: Tensor
    predictions: Tensor
    targets: Tensor  # without gradient


class BYOLNetworks(EncoderPredictor):
    """Encoder, projector, predictor, and the target network."""

    def __init__(self, config: Config, *batch_norm: Any) -> None:
        super().__init__(config, *batch_norm, form=config.model.projector, hidden=config.byol.predictor_hidden)
        # After the online networks, so that it copies the weights that they start from.
        self.target = TargetNetwork(self)

    def forward(self, pixels: Tensor) -> BYOLOutput:
        """Encode pixels (R, 3, S, S) uint8, channels_last, by both networks."""
        images = self.normalize(pixels)
        embeddings = self.embed(images)
        return BYOLOutput(embeddings, self.predictor(embeddings), self.target(images))


class BYOL(Method):
    """BYOL with encoder, projector, predictor and target network."""

    networks: BYOLNetworks

    def __init__(self, context: MethodContext) -> None:
        self.networks = build_networks(BYOLNetworks, context)
        self._settings = context.config.byol
        self._num_views = context.config.views.num_views
        self._total_steps = context.total_steps

    def loss(self, outputs: BYOLOutput, step: int, images: ImageRange) -> LossOutput:
        """Compute the distance of predictions to targets, over all ordered pairs of views."""
        loss = regression_loss(
            outputs.predictions,
            outputs.targets,
            num_views=self._num_views,
            normalize=self._settings.normalize,
        )
        return without_checks(loss, outputs.embeddings)

    def encoder_loaded(self) -> None:
        """Start the target network as a copy of the loaded encoder."""
        self.networks.target.copy_from(self.networks)

    def after_update(self, step: int, skipped: Tensor) -> None:
        """Move the target network towards the updated weights."""
        # The momentum follows from the step, so a checkpoint need not hold it.
        momentum = self._settings.momentum
        if self._settings.momentum_schedule == "cosine":
            momentum = cosine_momentum(step, self._total_steps, momentum)
        self.networks.target.follow(self.networks, momentum)
