"""Interface of a method: its networks, its loss, its checks and metrics, and its changes after an update.

Shapes: R = d*N views of this rank or micro-batch (view-major), k embedding size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.config.schema import Config
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.metric import Metric


@dataclass(frozen=True)
class MethodContext:
    """Run that a method is built for."""

    config: Config
    ranks: Ranks
    device: torch.device
    total_steps: int = 1
    """Number of updates of the whole run, for schedules. A benchmark, which learns nothing, may leave it at 1."""
    loss_group: Any = None
    """Process group of the ranks whose images the loss takes together; None: this rank alone."""
    batch_norm_group: str | None = None
    """Name of the process group over which BatchNorm takes its statistics; None: this rank alone."""


class LossOutput(NamedTuple):
    """Output of one micro-batch, on the device."""

    loss: Tensor  # 0-d float32, differentiable
    ok: Tensor  # (len(Method.checks),) bool; if one is False on any rank, no rank makes the update
    metrics: dict[str, Tensor]  # 0-d, by the names of Method.metrics
    embeddings: Tensor  # (R, k), to compute the effective rank


def without_checks(loss: Tensor, embeddings: Tensor, metrics: Mapping[str, Tensor] | None = None) -> LossOutput:
    """Return the output of a method without checks."""
    no_checks = torch.ones(0, dtype=torch.bool, device=loss.device)
    of_method = {name: value.detach() for name, value in (metrics or {}).items()}
    return LossOutput(loss, no_checks, of_method, embeddings)


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
    constant_rate: Sequence[nn.Parameter] = ()
    """Parameters that the optimizer updates with the peak learning rate in every step."""

    def loss(self, outputs: Any, step: int, images: ImageRange) -> LossOutput:
        """Compute the loss of the output of `networks`. The step calls this outside of autocast.

        outputs: output of `networks`. step: counted from 0. images: images of the step that `outputs` belongs to."""
        raise NotImplementedError(f"{type(self).__name__} must override loss")

    def encoder_loaded(self) -> None:
        """Adapt copies of the encoder, after the encoder of another run was loaded into `networks` (init_from)."""

    def before_update(self, step: int) -> None:
        """Change gradients before the optimizer uses them."""

    def after_update(self, step: int, skipped: Tensor) -> None:
        """Update state that follows the weights, such as a moving average or a queue.

        The step calls this once. If its update is skipped, it restores all state without gradients. Trained parameters that
        this changes must stay as they are if `skipped` (0-d bool, on the device)."""

    def health_warnings(self, values: Mapping[str, float]) -> list[str]:
        """Return warnings about the metrics of a logged line. values: metrics by name."""
        return []
