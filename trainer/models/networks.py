"""Networks of the methods: encoder and projector, with the initial weights of the seed.

Shapes: R = d*N views of this rank (view-major), S the size of a view in pixels, F features, k embedding size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.models.batch_norm import convert_batch_norm, stop_counting_batches
from trainer.models.encoder import Normalize, build_encoder, count_features
from trainer.models.projector import Projector


class EncoderNetwork(nn.Module):
    """Network from pixels to features: the part of every method's networks that is evaluated and used after training."""

    def __init__(self, config: Config, batch_norm_group: str | None = None, world_size: int = 1) -> None:
        """batch_norm_group: process group over which BatchNorm takes its statistics; None: each rank alone."""
        super().__init__()
        self.normalize = Normalize(config.views)
        encoder = build_encoder(config.model)
        self.num_features = count_features(encoder)
        parts = batch_norm_parts(config, config.model.encoder_batch_norm)
        self.encoder: Any = convert_batch_norm(encoder, parts, batch_norm_group, world_size)
        stop_counting_batches(self)
        self.keeps_features = False
        self.features: Tensor | None = None
        """Features (R, F) of the last forward, detached, if `keeps_features` is set (online probe)."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels (R, 3, S, S) uint8, channels_last, as features (R, F)."""
        features = self.encoder(self.normalize(pixels))
        if self.keeps_features:
            self.features = features.detach()
        return features


class EncoderProjector(EncoderNetwork):
    """Network from pixels to embeddings: encoder and projector."""

    def __init__(self, config: Config, batch_norm_group: str | None = None, world_size: int = 1) -> None:
        super().__init__(config, batch_norm_group, world_size)
        projector = Projector(config.model, self.num_features)
        # The projector may take its statistics differently from the encoder.
        parts = batch_norm_parts(config, config.model.projector_batch_norm)
        self.projector = convert_batch_norm(projector, parts, batch_norm_group, world_size)
        stop_counting_batches(self)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels (R, 3, S, S) uint8, channels_last, as embeddings (R, k) float32."""
        features = super().forward(pixels)
        return self.projector(features)


def batch_norm_parts(config: Config, statistics: str) -> int:
    """Return the number of parts of a batch that have separate BatchNorm statistics. statistics: "per_view" or "joint"."""
    return config.views.num_views if statistics == "per_view" else 1


def build_encoder_network(config: Config) -> EncoderNetwork:
    """Build the encoder on the CPU with the initial weights of the seed, the same as in every method."""
    # A method draws the weights of its encoder first, so they do not depend on the other networks.
    torch.manual_seed(config.seed)
    return EncoderNetwork(config)


def build_encoder_projector(config: Config, ranks: Ranks, batch_norm_group: str | None = None) -> EncoderProjector:
    """Build encoder and projector on the CPU with the initial weights of the seed, the same on every rank.

    batch_norm_group: name of the process group for model.batch_norm_ranks all; None: each rank alone."""
    torch.manual_seed(config.seed)
    group = batch_norm_group if config.model.batch_norm_ranks == "all" else None
    return EncoderProjector(config, group, ranks.world_size)
