"""VICReg method (Bardes et al., ICLR 2022), with encoder and projector.

Shapes: R = d*N views of this rank (view-major), k embedding size.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from torch import Tensor

from trainer.distributed.gather import sum_of_group
from trainer.distributed.ranks import ImageRange
from trainer.losses.vicreg import vicreg_terms
from trainer.methods.method import LossOutput, Method, MethodContext, without_checks
from trainer.metric import Metric
from trainer.models.networks import EncoderProjector, build_networks


class VICReg(Method):
    """VICReg. Variance and covariance are those of the images of all ranks."""

    metrics = MappingProxyType({name: Metric("loss") for name in ("invariance", "variance", "covariance")})

    def __init__(self, context: MethodContext) -> None:
        self.networks = build_networks(EncoderProjector, context)
        self._config = context.config
        self._loss_group = context.loss_group

    def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
        """Compute the weighted sum of the three terms. outputs: embeddings (R, k)."""
        settings = self._config.vicreg
        terms = vicreg_terms(
            outputs,
            num_views=self._config.views.num_views,
            num_images=self._config.data.images_per_step,
            sum_over_ranks=partial(sum_of_group, group=self._loss_group),
        )
        # The terms are metrics as well, without their weights.
        loss = (
            settings.invariance_weight * terms.invariance
            + settings.variance_weight * terms.variance
            + settings.covariance_weight * terms.covariance
        )
        return without_checks(loss, outputs, terms._asdict())
