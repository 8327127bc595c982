"""Fine-tuned classifier: an encoder and a linear layer, in a folder that timm and `load_classifier` read.

Shapes: R images, S size of the input, C classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import InputError
from trainer.export.encoder import Encoder
from trainer.export.folder import new_folder, write_weights
from trainer.export.sources import CONFIG, KEY, WEIGHTS, load_encoder
from trainer.export.state_dicts import read_weights


class Classifier(nn.Module):
    """Encoder and linear classifier. class_names: names of the C classes, in the order of the logits."""

    def __init__(self, encoder: Encoder, head: nn.Linear, class_names: list[str]) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.class_names = class_names

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits (R, C) of pixels (R, 3, S, S) uint8."""
        return self.head(self.encoder(pixels))


def save_classifier(classifier: Classifier, dest: Path) -> None:
    """Write the new folder `dest`, which `load_classifier` reads, and timm if model.stem is imagenet.

    Raises InputError if the folder exists, or if the encoder is not one of this program."""
    with new_folder(dest) as folder:
        write_weights(classifier.encoder, folder, classifier.head, classifier.class_names)


def load_classifier(folder: str | Path, device: str | torch.device = "cpu") -> Classifier:
    """Load a fine-tuned classifier, ready for use. Raises InputError if the folder holds none."""
    folder = Path(folder)
    path = folder / CONFIG
    encoder = load_encoder(folder)
    own: dict[str, Any] = json.loads(path.read_bytes()).get(KEY, {})
    # An exported encoder has the same files, but no head.
    if "head" not in own:
        raise InputError(f"{folder} holds an encoder without a classifier: give a folder that finetune.save_to wrote")
    # The name of the layer depends on the backbone, as timm names it.
    weights = read_weights(folder / WEIGHTS)
    weight = weights[f"{own['head']}.weight"]
    bias = weights[f"{own['head']}.bias"]
    num_classes, num_features = weight.shape
    head = nn.Linear(num_features, num_classes)
    head.load_state_dict({"weight": weight, "bias": bias})
    head.requires_grad_(False)
    classifier = Classifier(encoder, head, own["class_names"])
    return classifier.to(device).eval()
