"""Encoder: a timm backbone without its classifier, and the normalisation of pixels before it.

Shapes: R views, S the size of a view in pixels, F features.
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
    """Normalisation of pixels: scales 0..255 to 0..1, subtracts the mean, and divides by the standard deviation.

    It is part of the networks, so that a compiled graph fuses it with the cast of the first convolution, and so that
    evaluation always uses the same one."""

    def __init__(self, views: ViewsConfig, *, passes_floats: bool = False) -> None:
        """passes_floats: return views of a floating type as they are, because the augmentation has normalised them
        (data.augment_backend: triton)."""
        super().__init__()
        self.passes_floats = passes_floats
        self.factor: Tensor
        self.shift: Tensor
        mean = torch.tensor(views.mean).view(1, 3, 1, 1)
        std = torch.tensor(views.std).view(1, 3, 1, 1)
        self.register_buffer("factor", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalise (R, 3, S, S), values 0 to 255, to float32 in the same memory format."""
        if self.passes_floats and pixels.is_floating_point():
            return pixels
        return pixels.float() * self.factor + self.shift

    def undo(self, images: Tensor) -> Tensor:
        """Return the pixels, (R, 3, S, S) uint8, of normalised images on the CPU, to show them."""
        levels = (images.float() - self.shift) / self.factor
        return levels.round().clamp(0, 255).to(torch.uint8)


def build_encoder(config: ModelConfig, views: ViewsConfig | None = None) -> Any:
    """Build the timm backbone with pooling and without classifier, (R, 3, S, S) -> (R, F), see `count_features`.

    views: give S, on which the weights of vision transformers depend; None: the size for which timm has the backbone.

    Raises InputError if timm does not know the name, or if the backbone does not support the stem or several sizes.
    """
    known_models = timm.list_models()
    if config.backbone not in known_models:
        near = difflib.get_close_matches(config.backbone, known_models, 5)
        raise InputError(
            f"model.backbone is {config.backbone!r}, which timm does not have: choose a name of timm.list_models(); "
            f"similar: {', '.join(near) or 'none'}"
        )
    # Only timm's own ResNets take this option; other models may refuse it.
    options: dict[str, Any] = {}
    entrypoint = timm.models.model_entrypoint(config.backbone)
    if entrypoint.__module__ == "timm.models.resnet":
        options["zero_init_last"] = config.zero_init_last
    else:
        _log.info("model.zero_init_last has no effect: %s is not a ResNet of timm", config.backbone)
    # Vision transformers have an embedding of each position.
    pretrained = timm.get_pretrained_cfg(config.backbone)
    if views is not None and pretrained is not None and pretrained.fixed_input_size:
        if views.early_sizes:
            raise InputError(
                f"views.early_sizes is {list(views.early_sizes)}, but {config.backbone} only takes images of one size: remove "
                "views.early_sizes and views.early_size_epochs"
            )
        options["img_size"] = views.size
    # Without classes timm returns pooled features.
    encoder: Any = timm.create_model(config.backbone, pretrained=False, num_classes=0, **options)
    if config.stem != "imagenet":
        _replace_stem(encoder, config)
    if config.activation_checkpointing:
        encoder.set_grad_checkpointing(True)
    # Other kinds of pooling compute something else, or leave the flattening to a later layer (MobileNetV3).
    pool = getattr(encoder, "global_pool", None)
    if isinstance(pool, SelectAdaptivePool2d) and pool.pool_type == "avg" and isinstance(pool.flatten, nn.Flatten):
        encoder.global_pool = MeanPool()
    return encoder.to(memory_format=torch.channels_last)


def count_features(backbone: Any) -> int:
    """Return the number F of features of a backbone without classifier."""
    # Some models of timm have a layer between the pooling and the classifier, which changes the number.
    return getattr(backbone, "head_hidden_size", None) or backbone.num_features


class MeanPool(nn.Module):
    """Mean over height and width, whose gradient is channels_last.

    A plain mean over the last two dimensions has a gradient in another memory format, which then slows the last stage."""

    def forward(self, x: Tensor) -> Tensor:
        """(R, F, H, W) -> (R, F)."""
        return x.permute(0, 2, 3, 1).flatten(1, 2).mean(1)


def _replace_stem(encoder: Any, config: ModelConfig) -> None:
    """Replace the stem by one for small images: a 3x3 first convolution, with or without max-pooling.

    Its initial weights are torch's default, as in the authors' code (standard deviation 0.111; timm's would have 0.059).
    The stem `half`, which the paper does not use, gets timm's initial weights."""
    conv1 = getattr(encoder, "conv1", None)
    # A deep stem is a sequence of three convolutions.
    first = conv1[0] if isinstance(conv1, nn.Sequential) else conv1
    if not isinstance(first, nn.Conv2d) or not hasattr(encoder, "maxpool"):
        raise InputError(
            f"model.stem is {config.stem!r}, but {config.backbone} has no ResNet stem: set model.stem to imagenet"
        )
    stride = 2 if config.stem == "half" else 1
    small = nn.Conv2d(3, first.out_channels, 3, stride, padding=1, bias=False)
    if config.stem == "half":
        nn.init.kaiming_normal_(small.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(conv1, nn.Sequential):
        conv1[0] = small
    else:
        encoder.conv1 = small
    if config.stem != "small_pool":
        encoder.maxpool = nn.Identity()
