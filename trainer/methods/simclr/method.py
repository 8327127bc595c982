"""SimCLR method (Chen et al., ICML 2020): it pulls embeddings of the same image together and pushes others apart.

Shapes: R = d*N views of this rank (view-major), k embedding size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.config.schema import Config
from trainer.distributed.gather import gather_candidates
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.losses.contrastive import contrastive_loss
from trainer.methods.method import LossOutput, Method
from trainer.models.networks import build_encoder_projector


class SimCLR(Method):
    """SimCLR with encoder and projector. Each rank compares its embeddings with those of all ranks."""

    def __init__(
        self, config: Config, ranks: Ranks, device: torch.device, loss_group: Any, batch_norm_group: str | None
    ) -> None:
        """See `MethodSettings.build`."""
        self.networks = build_encoder_projector(config, ranks, batch_norm_group).to(device)
        self._num_views = config.views.num_views
        self._settings = config.simclr
        self._loss_group = loss_group

    def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
        """Compute the contrastive loss. outputs: embeddings (R, k)."""
        candidates = outputs
        first_image = 0
        # The loss group is all ranks, so an image has the same number in the candidates as in the step.
        if self._loss_group is not None:
            candidates = gather_candidates(outputs, self._num_views, self._loss_group)
            first_image = images.first
        loss = contrastive_loss(
            outputs,
            candidates,
            num_views=self._num_views,
            temperature=self._settings.temperature,
            normalize=self._settings.normalize,
            first_image=first_image,
        )
        no_checks = torch.ones(0, dtype=torch.bool, device=loss.device)
        return LossOutput(loss, no_checks, {}, outputs)
