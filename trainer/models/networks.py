"""Put encoder and projector together, with the seed's initial weights.

Shapes: R = d*N views of this rank (view-major), S pixels a side, F features, k embedding size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.models.batch_norm import convert_batch_norm, stop_counting_batches
from trainer.models.encoder import Normalize, build_encoder
from trainer.models.projector import Projector


class EncoderNetwork(nn.Module):
    """Pixels to features: the part of every method's networks that is evaluated and used afterwards."""

    def __init__(self, config: Config, batch_norm_group: str | None = None, world_size: int = 1) -> None:
        """batch_norm_group: process group over which BatchNorm takes its statistics, for model.batch_norm_ranks: all."""
        super().__init__()
        self.normalize = Normalize(config.views)
        encoder = build_encoder(config.model)
        self.num_features: int = encoder.num_features
        parts = batch_norm_parts(config, config.model.encoder_batch_norm)
        self.encoder: Any = convert_batch_norm(encoder, parts, batch_norm_group, world_size)
        stop_counting_batches(self)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (R, 3, S, S) uint8, channels_last -> features (R, F)."""
        return self.encoder(self.normalize(pixels))


class EncoderProjector(EncoderNetwork):
    """Pixels to embeddings."""

    def __init__(self, config: Config, batch_norm_group: str | None = None, world_size: int = 1) -> None:
        super().__init__(config, batch_norm_group, world_size)
        projector = Projector(config.model, self.num_features)
        parts = batch_norm_parts(config, config.model.projector_batch_norm)
        self.projector = convert_batch_norm(projector, parts, batch_norm_group, world_size)
        stop_counting_batches(self)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (R, 3, S, S) uint8, channels_last -> embeddings (R, k), float32."""
        return self.projector(self.encoder(self.normalize(pixels)))


def batch_norm_parts(config: Config, statistics: str) -> int:
    """Return the number of parts of a batch that have BatchNorm statistics of their own, for "per_view" or "joint"."""
    return {"per_view": config.views.num_views, "joint": 1}[statistics]


def build_encoder_network(config: Config) -> EncoderNetwork:
    """Build the encoder with the seed's initial weights, which are those of every method, on the CPU."""
    torch.manual_seed(config.seed)
    return EncoderNetwork(config)


def build_encoder_projector(config: Config, ranks: Ranks, batch_norm_group: str | None = None) -> EncoderProjector:
    """Build encoder and projector with the seed's initial weights, the same on every rank, on the CPU.

    batch_norm_group: name of a process group; None: BatchNorm takes its statistics from this rank alone."""
    torch.manual_seed(config.seed)
    group = batch_norm_group if config.model.batch_norm_ranks == "all" else None
    return EncoderProjector(config, group, ranks.world_size)
