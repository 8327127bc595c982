"""Interface of a method: its networks, its loss, its checks and metrics, and its changes after an update.

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
    """Output of one micro-batch, on the device."""

    loss: Tensor  # 0-d float32, differentiable
    ok: Tensor  # (len(Method.checks),) bool; if one is False on any rank, no rank makes the update
    metrics: dict[str, Tensor]  # 0-d, by the names of Method.metrics
    embeddings: Tensor  # (R, k), to compute the effective rank


class Method:
    """Method of self-supervised learning. The step calls `networks`, then `loss`, and after the optimizer `after_update`.

    `networks` holds all state: trained parameters, parameters without gradient (a target network), and buffers (statistics, a
    queue). Checkpoints then include it, and a skipped update restores it, without any code of the method.
    """

    networks: nn.Module
    """Networks that take pixels (R, 3, S, S) uint8, channels_last. The evaluator loads `networks.encoder` and
    `networks.normalize`."""
    checks: tuple[str, ...] = ()
    """Descriptions of the faults that the loss checks for, such as "a slice cannot be whitened". Causes come before
    consequences."""
    metrics: Mapping[str, Metric] = MappingProxyType({})
    """Metrics besides the loss, by their names in metrics.jsonl."""
    remedy: str = ""
    """A setting that helps if checks fail, for error messages."""

    def loss(self, outputs: Any, step: int, images: ImageRange) -> LossOutput:
        """Compute the loss of the output of `networks`. The step calls this outside of autocast.

        outputs: output of `networks`. step: counted from 0. images: images of the step that `outputs` belongs to."""
        raise NotImplementedError(f"{type(self).__name__} must override loss")

    def after_update(self, step: int) -> None:
        """Update state that follows the weights, such as a moving average or a queue.

        The step calls this once, and undoes the changes if its update is skipped."""

    def health_warnings(self, values: Mapping[str, float]) -> list[str]:
        """Return warnings about the metrics of a logged line. values: metrics by name."""
        return []
