"""The encoder: a timm backbone without its classifier, and the normalisation of pixels before it.

Shapes: R views, S pixels a side, F features.
"""

from __future__ import annotations

import difflib
import logging
from typing import Any

import timm
import torch
from timm.layers import SelectAdaptivePool2d
from torch import Tensor, nn

from trainer.config.schema import ModelConfig, ViewsConfig
from trainer.errors import InputError

_log = logging.getLogger(__name__)


class Normalize(nn.Module):
    """uint8 0..255 to float: scaled to 0..1, less the mean, over the standard deviation. Part of the model, so that a
    compiled graph fuses it with the first convolution's cast, and evaluation can't take another."""

    def __init__(self, views: ViewsConfig) -> None:
        super().__init__()
        self.factor: Tensor
        self.shift: Tensor
        mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (views.mean, views.std))
        self.register_buffer("factor", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """(R, 3, S, S) uint8 -> the same as float32, memory format kept."""
        return pixels.float() * self.factor + self.shift


def build_encoder(config: ModelConfig) -> Any:
    """The timm backbone with pooling and without classifier, (R, 3, S, S) -> (R, F); F is its `num_features`.

    Raises InputError for a name that timm does not know and for a stem that the backbone has no place for.
    """
    if config.backbone not in timm.list_models():
        near = difflib.get_close_matches(config.backbone, timm.list_models(), 5)
        raise InputError(
            f"model.backbone is {config.backbone!r}: timm has no such model; near: {', '.join(near) or 'none'}"
        )
    options: dict[str, Any] = {}
    if timm.models.model_entrypoint(config.backbone).__module__ == "timm.models.resnet":
        options["zero_init_last"] = config.zero_init_last
    else:
        _log.info("model.zero_init_last has no effect: %s is no timm ResNet", config.backbone)
    encoder: Any = timm.create_model(config.backbone, pretrained=False, num_classes=0, **options)
    if config.stem != "imagenet":
        _small_stem(encoder, config)
    if config.activation_checkpointing:
        encoder.set_grad_checkpointing(True)
    if (
        isinstance(getattr(encoder, "global_pool", None), SelectAdaptivePool2d)
        and encoder.global_pool.pool_type == "avg"
    ):
        encoder.global_pool = MeanPool()
    return encoder.to(memory_format=torch.channels_last)


class MeanPool(nn.Module):
    """(R, F, H, W) -> (R, F), their mean. A mean over the last two dimensions has a gradient whose memory is not channels_last,
    which turns the last stage's gradients around."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(1, 2).mean(1)


def _small_stem(encoder: Any, config: ModelConfig) -> None:
    """Replace the stem by the recipes' one for small images: a 3x3 first convolution, with or without the max-pool.

    Its initial weights are torch's default, as in the authors' code (standard deviation 0.111; timm's would have 0.059)."""
    conv1 = getattr(encoder, "conv1", None)
    first = conv1[0] if isinstance(conv1, nn.Sequential) else conv1  # a deep stem has three convolutions
    if not isinstance(first, nn.Conv2d) or not hasattr(encoder, "maxpool"):
        raise InputError(f"model.stem is {config.stem!r}, but {config.backbone} has no ResNet stem: set it to imagenet")
    small = nn.Conv2d(3, first.out_channels, 3, 2 if config.stem == "half" else 1, padding=1, bias=False)
    if config.stem == "half":  # a stem that is not the paper's keeps timm's initial weights
        nn.init.kaiming_normal_(small.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(conv1, nn.Sequential):
        conv1[0] = small
    else:
        encoder.conv1 = small
    if config.stem != "small_pool":
        encoder.maxpool = nn.Identity()
