"""Projector: a small network between the features of the encoder and the loss.

Shapes: R views, F features, k embedding size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from trainer.config.schema import ModelConfig
from trainer.models.batch_norm import at_least_float32


class Projector(nn.Module):
    """Linear layers with BatchNorm and ReLU in between, as model.projector describes.

    The last Linear computes in float32 even under autocast. Whitening divides by the square roots of the eigenvalues of the
    covariance, which span a factor of 100, and would enlarge the rounding errors of bf16 by as much. The cost is negligible.
    """

    def __init__(self, config: ModelConfig, num_features: int) -> None:
        super().__init__()
        # SimCLR's projector has no biases, and its last BatchNorm has no shift.
        simclr = config.projector == "simclr"
        sizes = [num_features, *config.projector_hidden]
        hidden: list[nn.Module] = []
        for size, next_size in pairwise(sizes):
            hidden += [
                nn.Linear(size, next_size, bias=not simclr),
                nn.BatchNorm1d(next_size),
                nn.ReLU(),
            ]
        self.hidden = nn.Sequential(*hidden)
        self.last = nn.Linear(sizes[-1], config.embedding_size, bias=not simclr)
        # The projector of kind mlp ends with a plain Linear, the other kinds with a BatchNorm.
        self.norm = nn.Identity() if config.projector == "mlp" else nn.BatchNorm1d(config.embedding_size)
        if simclr:
            self.norm.register_parameter("bias", None)

    def forward(self, features: Tensor) -> Tensor:
        """Project features (R, F) to embeddings (R, k) float32."""
        x = self.hidden(features)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(self.last(at_least_float32(x)))
