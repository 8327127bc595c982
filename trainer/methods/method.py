"""The interface of a method: networks, a loss, and what follows an update.

Shapes: R = d*N views of this rank or micro-batch (view-major), k embedding size.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainer.distributed.ranks import ImageRange
from trainer.metric import Metric


class LossOutput(NamedTuple):
    """What the loss of one micro-batch leaves on the device."""

    loss: Tensor  # 0-d float32, differentiable
    ok: Tensor  # (len(Method.checks),) bool; if one is False on any rank, no rank makes the update
    metrics: dict[str, Tensor]  # 0-d, by the names of Method.metrics
    embeddings: Tensor  # (R, k), of which the effective rank is logged


class Method:
    """A method of self-supervised learning. The step calls `networks`, then `loss`; after the optimizer, `after_update`.

    All state is in `networks`: parameters that are trained, parameters that need no gradient (a target network), and buffers
    (statistics, a queue). A checkpoint holds it, and a skipped update restores it, without any code of the method.
    """

    networks: nn.Module
    """Called with pixels (R, 3, S, S) uint8, channels_last. `networks.encoder` and `networks.normalize` are what the evaluator
    loads."""
    checks: tuple[str, ...] = ()
    """What may fail in a step, causes before consequences, as text for the log: "a slice can't be whitened"."""
    metrics: Mapping[str, Metric] = MappingProxyType({})
    """Metrics beside the loss, by their names in metrics.jsonl."""
    remedy: str = ""
    """A setting that helps if checks fail, for error messages."""

    def loss(self, outputs: Any, step: int, images: ImageRange) -> LossOutput:
        """Compute the loss of what `networks` returned. Runs outside autocast.

        step: counted from 0. images: the images of the step that `outputs` belongs to."""
        raise NotImplementedError

    def after_update(self, step: int) -> None:
        """Change what follows the weights: a moving average, a queue. Called once a step; undone if the update is skipped."""

    def health_warnings(self, values: Mapping[str, float]) -> list[str]:
        """Return warnings about the metrics of a logged line."""
        return []
