"""Encoder in evaluation mode, together with what it needs to know about pixels, and where its weights are from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from trainer.config.schema import ModelConfig, ViewsConfig
from trainer.models.batch_norm import stop_counting_batches
from trainer.models.encoder import Normalize

if TYPE_CHECKING:
    from trainer.export.compute import ImageFeatures, Images


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes the encoder's input: resize the shorter edge, cut out the centre, scale to 0..1, normalise."""

    size: int  # width and height of the input in pixels
    eval_resize: int  # shorter edge of the image before the centre is cut out, in pixels
    interpolation: Literal["bicubic", "bilinear"]
    mean: tuple[float, ...]  # of each channel, subtracted from pixels in 0..1
    std: tuple[float, ...]

    @classmethod
    def of_views(cls, views: ViewsConfig) -> Preprocess:
        """Return the evaluation's part of the augmentation recipe."""
        return cls(views.size, views.eval_resize, views.interpolation, views.mean, views.std)

    @property
    def views(self) -> ViewsConfig:
        """Settings with which the loader gives centre crops of this kind."""
        red, green, blue = self.mean
        red_std, green_std, blue_std = self.std
        return ViewsConfig(
            size=self.size,
            eval_resize=self.eval_resize,
            interpolation=self.interpolation,
            mean=(red, green, blue),
            std=(red_std, green_std, blue_std),
        )


@dataclass(frozen=True)
class Origin:
    """Where the weights are from."""

    name: str
    model: ModelConfig | None = None  # builds the backbone again; None for weights of other programs
    class_names: list[str] = field(default_factory=list)  # of the training set, empty if unknown
    facts: dict[str, Any] = field(default_factory=dict)  # checkpoint, step, method, settings


class Encoder(nn.Module):
    """Network from pixels to features, with frozen weights and in evaluation mode.

    name: short description. sha256: digest of the weights, the same for a run and for its export. num_features: F.
    preprocess, class_names: see `Preprocess` and `Origin`.
    """

    def __init__(self, backbone: Any, preprocess: Preprocess, origin: Origin) -> None:
        """backbone: (R, 3, S, S) normalised pixels -> (R, F)."""
        super().__init__()
        self.normalize = Normalize(preprocess.views)
        self.encoder: Any = backbone
        # Some timm models have a layer between the pooling and the classifier, which changes the number of features.
        self.num_features: int = getattr(backbone, "head_hidden_size", None) or backbone.num_features
        self.preprocess = preprocess
        self.origin = origin
        self.name = origin.name
        self.class_names = origin.class_names
        self.sha256 = ""
        stop_counting_batches(self)

    def freeze(self) -> Encoder:
        """Switch to evaluation mode for good, once the weights are loaded. Returns self."""
        self.requires_grad_(False).eval()
        self.sha256 = weights_digest(self.encoder.state_dict())
        return self

    def train(self, mode: bool = True) -> Encoder:
        """Stay in evaluation mode, because training would change the statistics of BatchNorm."""
        return super().train(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels (R, 3, S, S) uint8 as features (R, F) float32, or in the type of an autocast around it."""
        return self.encoder(self.normalize(pixels))

    def features(self, images: Images, **options: Any) -> ImageFeatures:
        """Compute the features of a folder or a list of images, see `trainer.export.compute.features`."""
        from trainer.export.compute import features

        return features(self, images, **options)


def weights_digest(state: dict[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and values of the tensors, whatever their order and memory format."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # A flat copy is in the order of the indices, also if the tensor is channels_last.
        digest.update(tensor.flatten().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
