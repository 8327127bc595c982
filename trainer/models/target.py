"""Target network: a copy of encoder and projector that follows their weights as a moving average.

Grill et al., "Bootstrap Your Own Latent", NeurIPS 2020, section 3.1; He et al., "Momentum Contrast", CVPR 2020, equation 2.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from trainer.models.batch_norm import encode_views
from trainer.models.networks import EncoderProjector


class TargetNetwork(nn.Module):
    """Copy of encoder and projector without gradients.

    It always stays in training mode, so BatchNorm uses the statistics of the batch. Its running statistics are never used."""

    def __init__(self, online: EncoderProjector) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(online.encoder)
        self.projector = copy.deepcopy(online.projector)
        # The optimizer and DDP leave out parameters without a gradient.
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Encode normalised images (R, 3, S, S) as embeddings (R, k) float32."""
        return self.projector(encode_views(self.encoder, images))

    def copy_from(self, online: EncoderProjector) -> None:
        """Copy weights and statistics of encoder and projector."""
        self.encoder.load_state_dict(online.encoder.state_dict())
        self.projector.load_state_dict(online.projector.state_dict())

    @torch.no_grad()
    def follow(self, online: EncoderProjector, momentum: float) -> None:
        """Replace each weight t by momentum t + (1 - momentum) s, where s is the weight of encoder or projector."""
        # Parameters of a copy have the same order as those of the original.
        targets: list[Tensor] = list(self.parameters())
        sources: list[Tensor] = [*online.encoder.parameters(), *online.projector.parameters()]
        torch._foreach_lerp_(targets, sources, 1 - momentum)


def cosine_momentum(step: int, total_steps: int, first: float) -> float:
    """Return the momentum after the update of a step: half a cosine from `first` at step 0 to 1 at total_steps (BYOL)."""
    angle = math.pi * min(step / total_steps, 1.0)
    return 1 - (1 - first) * (math.cos(angle) + 1) / 2
