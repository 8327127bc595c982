"""Alignment and uniformity (Wang and Isola, ICML 2020, equation 18) with the networks and the queue of MoCo.

Shapes: N images of this rank, k embedding size.
"""

from __future__ import annotations

from types import MappingProxyType

from trainer.distributed.gather import gather_rows
from trainer.distributed.ranks import ImageRange
from trainer.losses.align_uniform import alignment, uniformity
from trainer.methods.method import LossOutput, MethodContext, without_checks
from trainer.methods.moco.queue_method import QueueMethod, QueueOutput
from trainer.metric import Metric


class AlignUniform(QueueMethod):
    """Alignment and uniformity. Every rank computes the uniformity of the queries of all ranks."""

    metrics = MappingProxyType({"alignment": Metric("loss"), "uniformity": Metric("loss")})

    def __init__(self, context: MethodContext) -> None:
        self._weights = context.config.align_uniform
        super().__init__(context, self._weights)
        self._loss_group = context.loss_group

    def loss(self, outputs: QueueOutput, step: int, images: ImageRange) -> LossOutput:
        """Compute the weighted sum of alignment and uniformity."""
        queries, keys = self.compare(outputs, images)
        # A key is that of one query, so the alignment needs no other rank.
        align = alignment(queries, keys)
        if self._loss_group is not None:
            # The pairs of queries are those of all ranks, so their number does not depend on the ranks.
            queries = gather_rows(queries, 1, self._loss_group)
        uniform = uniformity(queries, self.networks.queue, t=self._weights.uniform_t)
        loss = self._weights.align_weight * align + self._weights.uniform_weight * uniform
        return without_checks(loss, outputs.queries, {"alignment": align, "uniformity": uniform})
