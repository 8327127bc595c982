"""The projector: a small network between the encoder's features and the loss.

Shapes: R views, F features, k embedding size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from trainer.config.schema import ModelConfig
from trainer.models.batch_norm import at_least_float32


class Projector(nn.Module):
    """Linear layers with BatchNorm and ReLU between; config.projector says which have what.

    The last Linear works in float32 under autocast too: whitening divides by the square roots of the covariance's
    eigenvalues, which span a factor of 100, and would blow the rounding of bf16 up by as much. It costs next to nothing.
    """

    def __init__(self, config: ModelConfig, num_features: int) -> None:
        super().__init__()
        simclr = config.projector == "simclr"
        sizes = [num_features, *config.projector_hidden]
        hidden: list[nn.Module] = []
        for size, next_size in pairwise(sizes):
            hidden += [nn.Linear(size, next_size, bias=not simclr), nn.BatchNorm1d(next_size), nn.ReLU()]
        self.hidden = nn.Sequential(*hidden)
        self.last = nn.Linear(sizes[-1], config.embedding_size, bias=not simclr)
        self.norm = nn.Identity() if config.projector == "mlp" else nn.BatchNorm1d(config.embedding_size)
        if simclr:
            self.norm.register_parameter("bias", None)

    def forward(self, features: Tensor) -> Tensor:
        """(R, F) -> (R, k) float32."""
        x = self.hidden(features)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(self.last(at_least_float32(x)))
