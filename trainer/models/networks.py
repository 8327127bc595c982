"""Networks of the methods: encoder and projector, with the initial weights of the seed.

Shapes: R = d*N views of this rank (view-major), S the size of a view in pixels, F features, k embedding size.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.config.schema import Config
from trainer.distributed.geometry import batch_norm_group_size
from trainer.methods.method import MethodContext
from trainer.models.batch_norm import (
    convert_batch_norm,
    encode_one_view_at_a_time,
    encode_views,
    stop_counting_batches,
)
from trainer.models.encoder import Normalize, build_encoder, count_features
from trainer.models.projector import Projector

N = TypeVar("N", bound="EncoderNetwork")


class EncoderNetwork(nn.Module):
    """Network from pixels to features: the part of every method's networks that is evaluated and used after training."""

    def __init__(
        self, config: Config, batch_norm_group: str | None = None, world_size: int = 1, *, batch_norm_rows: int = 0
    ) -> None:
        """batch_norm_group: process group over which BatchNorm takes its statistics; None: each rank alone.

        batch_norm_rows: number of consecutive rows for which it takes them separately; 0: as the config says."""
        super().__init__()
        self.normalize = Normalize(config.views, passes_floats=True)
        encoder = build_encoder(config.model, config.views)
        self.num_features = count_features(encoder)
        statistics = config.model.encoder_batch_norm
        self.encoder: Any = _with_batch_norm(encoder, config, statistics, batch_norm_group, world_size, batch_norm_rows)
        if config.model.batch_norm_backend == "triton_conv":
            from trainer.models.fused_convolution import fuse_convolutions  # an evaluation needs no kernels

            fuse_convolutions(self.encoder, config.model.backbone)
        stop_counting_batches(self)
        # The online probe sets this.
        self.keeps_features = False
        self.features: Tensor | None = None
        """Features (R, F) of the last forward, detached, if `keeps_features` is set (online probe)."""

    def forward(self, pixels: Tensor) -> Any:
        """Encode pixels (R, 3, S, S) uint8, channels_last: here as features (R, F), in subclasses as the input of a loss."""
        return self.encode(self.normalize(pixels))

    def encode(self, images: Tensor) -> Tensor:
        """Encode normalised images (R, 3, S, S) as features (R, F)."""
        features = encode_views(self.encoder, images)
        if self.keeps_features:
            self.features = features.detach()
        return features


class EncoderProjector(EncoderNetwork):
    """Network from pixels to embeddings: encoder and projector."""

    def __init__(
        self, config: Config, batch_norm_group: str | None = None, world_size: int = 1, *, batch_norm_rows: int = 0
    ) -> None:
        super().__init__(config, batch_norm_group, world_size, batch_norm_rows=batch_norm_rows)
        model = config.model
        # The projector is drawn after the encoder, whose weights so stay the same with any projector.
        projector = Projector(model.projector, self.num_features, model.projector_hidden, model.embedding_size)
        # The projector may take its statistics differently from the encoder.
        statistics = model.projector_batch_norm
        self.projector = _with_batch_norm(projector, config, statistics, batch_norm_group, world_size, batch_norm_rows)
        stop_counting_batches(self)

    def forward(self, pixels: Tensor) -> Any:
        """Encode pixels (R, 3, S, S) uint8, channels_last, as embeddings (R, k) float32."""
        return self.embed(self.normalize(pixels))

    def embed(self, images: Tensor) -> Tensor:
        """Encode normalised images (R, 3, S, S) as embeddings (R, k) float32."""
        return self.projector(self.encode(images))


class EncoderPredictor(EncoderProjector):
    """Encoder, projector, and a predictor from embeddings to embeddings."""

    def __init__(
        self, config: Config, batch_norm_group: str | None = None, world_size: int = 1, *, form: str, hidden: int
    ) -> None:
        """form: see `Projector`. hidden: size of the predictor's hidden layer."""
        super().__init__(config, batch_norm_group, world_size)
        # A prediction is compared with an embedding, so it has the same size.
        size = config.model.embedding_size
        predictor = Projector(form, size, [hidden], size)
        statistics = config.model.projector_batch_norm
        self.predictor = _with_batch_norm(predictor, config, statistics, batch_norm_group, world_size)
        stop_counting_batches(self)


def batch_norm_parts(config: Config, statistics: str) -> int:
    """Return the number of parts of a batch that have separate BatchNorm statistics. statistics: "per_view" or "joint"."""
    return config.views.num_views if statistics == "per_view" else 1


def _with_batch_norm(
    module: nn.Module, config: Config, statistics: str, group_name: str | None, world_size: int, rows: int = 0
) -> nn.Module:
    """Replace every BatchNorm inside `module` as the config says; see `convert_batch_norm` for the arguments."""
    parts = batch_norm_parts(config, statistics)
    if config.model.batch_norm_backend == "torch":
        return convert_batch_norm(module, parts, group_name, world_size, rows)
    # Not at the top of the file, because an evaluation needs no kernels.
    from trainer.models.fused_batch_norm import FusedBatchNorm, fuse_activations

    return fuse_activations(convert_batch_norm(module, parts, group_name, world_size, rows, kind=FusedBatchNorm))


def build_encoder_network(config: Config) -> EncoderNetwork:
    """Build the encoder on the CPU with the initial weights of the seed, the same as in every method."""
    # A method draws the weights of its encoder first, so they do not depend on the other networks.
    torch.manual_seed(config.seed)
    return EncoderNetwork(config)


def build_networks(kind: type[N], context: MethodContext, **options: Any) -> N:
    """Build the networks of a method with the initial weights of the seed, the same on every rank.

    options: further arguments of the class `kind`."""
    config = context.config
    group = context.batch_norm_group
    group_size = batch_norm_group_size(config, context.ranks.world_size)
    # Random numbers are drawn on the CPU, so the device does not change the weights.
    torch.manual_seed(config.seed)
    networks = kind(config, group, group_size, **options).to(context.device)
    if context.device.type == "cpu" and group is None:
        encode_one_view_at_a_time(networks)
    return networks
