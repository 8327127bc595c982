"""SimSiam method (Chen and He, CVPR 2021): each view predicts the embeddings of the other views.

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


class SimSiamOutput(NamedTuple):
    """Embeddings of a batch of views, (R, k) each."""

    embeddings: Tensor
    predictions: Tensor


class SimSiamNetworks(EncoderPredictor):
    """Encoder, projector and predictor."""

    def __init__(self, config: Config, *batch_norm: Any) -> None:
        super().__init__(config, *batch_norm, form="simsiam_predictor", hidden=config.simsiam.predictor_hidden)

    def forward(self, pixels: Tensor) -> SimSiamOutput:
        """Encode pixels (R, 3, S, S) uint8, channels_last."""
        embeddings = self.embed(self.normalize(pixels))
        return SimSiamOutput(embeddings, self.predictor(embeddings))


class SimSiam(Method):
    """SimSiam with encoder, projector and predictor. No gradient flows through the predicted embeddings."""

    networks: SimSiamNetworks

    def __init__(self, context: MethodContext) -> None:
        self.networks = build_networks(SimSiamNetworks, context)
        self._num_views = context.config.views.num_views
        if context.config.simsiam.constant_predictor_rate:
            # The predictor then adapts to the embeddings until the end of the run, which its authors found to help.
            self.constant_rate = tuple(self.networks.predictor.parameters())

    def loss(self, outputs: SimSiamOutput, step: int, images: ImageRange) -> LossOutput:
        """Compute the mean negative cosine of predictions and embeddings of other views."""
        # With a gradient through the targets as well, the embeddings would collapse.
        targets = outputs.embeddings.detach()
        distance = regression_loss(outputs.predictions, targets, num_views=self._num_views)
        # The two directions of a pair have 2 - 2 cos each.
        loss = distance / 4 - 1
        return without_checks(loss, outputs.embeddings)
