"""MoCo v2 method (Chen et al., 2020): each query is compared with its key and a queue of keys of earlier steps."""

from __future__ import annotations

from trainer.distributed.ranks import ImageRange
from trainer.losses.queue_contrast import queue_contrast_loss
from trainer.methods.method import LossOutput, MethodContext, without_checks
from trainer.methods.moco.queue_method import QueueMethod, QueueOutput


class MoCo(QueueMethod):
    """MoCo with query network, key network and queue."""

    def __init__(self, context: MethodContext) -> None:
        settings = context.config.moco
        super().__init__(context, settings, symmetric=settings.symmetric)
        self._temperature = settings.temperature

    def loss(self, outputs: QueueOutput, step: int, images: ImageRange) -> LossOutput:
        """Compute the contrastive loss of the queries."""
        # The queue still holds the keys of earlier steps only: `after_update` adds those of this step.
        queries, keys = self.compare(outputs, images)
        loss = queue_contrast_loss(queries, keys, self.networks.queue, temperature=self._temperature)
        return without_checks(loss, outputs.queries)
