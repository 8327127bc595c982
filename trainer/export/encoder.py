"""Encoder in evaluation mode, together with what it needs to know about pixels, and where its weights are from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from trainer.config.schema import ModelConfig, ViewsConfig
from trainer.models.batch_norm import stop_counting_batches
from trainer.models.encoder import Normalize, count_features
from trainer.run.checkpoint import content_digest

if TYPE_CHECKING:
    from trainer.export.compute import ImageFeatures, Images


@dataclass(frozen=True)
class Preprocess:
    """Steps from an image to the encoder's input: resize the shorter edge, cut out the centre, scale to 0..1, normalise."""

    size: int  # width and height of the input in pixels
    eval_resize: int  # shorter edge of the image before the centre is cut out, in pixels
    interpolation: Literal["bicubic", "bilinear"]
    mean: tuple[float, ...]  # of each channel, subtracted from pixels in 0..1
    std: tuple[float, ...]

    @property
    def views(self) -> ViewsConfig:
        """Settings with which the loader gives centre crops of this kind."""
        return ViewsConfig(**asdict(self))


class Encoder(nn.Module):
    """Network from pixels to features, with frozen weights and in evaluation mode.

    sha256: digest of the weights, the same for a run and for its export. num_features: F.
    """

    def __init__(
        self,
        backbone: Any,
        preprocess: Preprocess,
        name: str,
        *,
        model: ModelConfig | None = None,
        class_names: list[str] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """backbone: (R, 3, S, S) normalised pixels -> (R, F). name: short description.

        model: builds the backbone again; None for weights of other programs. class_names: of the training set, None if
        unknown. facts: plain values about the training."""
        super().__init__()
        self.set_preprocess(preprocess)
        # The same parts as those of a run's network, so that checkpoints and protocols fit both.
        self.encoder = backbone
        self.num_features = count_features(backbone)
        self.name = name
        self.model = model
        self.class_names = class_names or []
        self.facts = facts or {}
        self.sha256 = ""
        stop_counting_batches(self)

    @property
    def device(self) -> torch.device:
        """Device of the encoder."""
        return self.normalize.factor.device

    def set_preprocess(self, preprocess: Preprocess) -> None:
        """Replace the preprocessing, of which the encoder itself does the normalisation."""
        self.preprocess = preprocess
        self.normalize = Normalize(preprocess.views)

    def freeze(self) -> Encoder:
        """Switch to evaluation mode for good, once the weights are loaded. Returns self."""
        self.requires_grad_(False).eval()
        self.sha256 = content_digest(self.plain_state())
        return self

    def plain_state(self) -> dict[str, Tensor]:
        """Return a copy of the weights on the CPU with the backbone's names, in the memory format of other programs."""
        tensors = self.encoder.state_dict().items()
        # A clone also has the usual strides in dimensions of length 1, which the digest covers.
        return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors}

    def train(self, mode: bool = True) -> Encoder:
        """Stay in evaluation mode, because training would change the statistics of BatchNorm."""
        return super().train(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels (R, 3, S, S) uint8 as features (R, F) float32, or in the type of an autocast around it."""
        return self.encoder(self.normalize(pixels))

    def features(self, images: Images, **options: Any) -> ImageFeatures:
        """Compute the features of a folder or a list of images, see `trainer.export.compute.features`."""
        # `compute` imports this module, and DALI takes seconds to import.
        from trainer.export.compute import features

        return features(self, images, **options)
