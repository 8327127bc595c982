"""Write an encoder in formats that timm, torchvision and ONNX runtimes load. Each is loaded back and compared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

from trainer.config.schema import ModelConfig
from trainer.errors import InputError
from trainer.export.encoder import Encoder
from trainer.files import atomic_write

ONNX = "encoder.onnx"
_TOLERANCE = 1e-4  # of the largest feature; other libraries may add up in another order
_OPSET = 18
_log = logging.getLogger(__name__)


class NotPossibleError(InputError):
    """This encoder cannot be written in this format."""


def _write_timm(encoder: Encoder, model: ModelConfig, folder: Path) -> None:
    """Check that timm loads the folder as it is."""
    if model.stem != "imagenet":
        raise NotPossibleError(
            f"timm has no ResNet with model.stem {model.stem}: use --format onnx, or --format all, whose folder "
            "trainer.export.load_encoder loads; docs/export.md shows how to build it from timm in four lines"
        )
    # The folder already has the form of timm, so nothing else is written.
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    _compare(encoder, lambda pixels: network(encoder.normalize(pixels)), "timm")


def _write_torchvision(encoder: Encoder, model: ModelConfig, folder: Path) -> None:
    """Write a state dict with torchvision's names, if torchvision has this network."""
    # timm and torchvision give the modules of these networks the same names.
    is_resnet = timm.models.model_entrypoint(model.backbone).__module__ == "timm.models.resnet"
    if not is_resnet or model.backbone not in torchvision.models.list_models() or model.stem != "imagenet":
        raise NotPossibleError(
            f"torchvision has no {model.backbone} with model.stem {model.stem}, only ResNets with the stem imagenet: use "
            "--format onnx, or --format all, whose folder trainer.export.load_encoder loads"
        )
    network: Any = torchvision.models.get_model(model.backbone, weights=None)
    state = encoder.plain_state()
    # The state dict has no classifier.
    network.fc = nn.Identity()
    network.load_state_dict(state)
    network.eval()
    _compare(encoder, lambda pixels: network(encoder.normalize(pixels)), "torchvision")
    with atomic_write(folder / f"torchvision_{model.backbone}.pth") as file:
        torch.save(state, file)


def _write_onnx(encoder: Encoder, model: ModelConfig, folder: Path) -> None:
    """Write encoder.onnx: uint8 pixels -> features, with the normalisation inside and any number of images."""
    missing = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if missing:
        raise NotPossibleError(f"the ONNX export needs {' and '.join(missing)}: run `pip install {' '.join(missing)}`")
    # Only their shape matters here, and the first dimension stays free.
    pixels = _random_pixels(encoder)
    program = torch.onnx.export(
        encoder,
        (pixels,),
        input_names=["pixels"],
        output_names=["features"],
        dynamic_shapes=({0: torch.export.Dim("images")},),
        opset_version=_OPSET,
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # it is None only for the old exporter
    program.save(folder / ONNX, external_data=False)
    if find_spec("onnxruntime") is None:
        _log.warning("%s was not compared, because onnxruntime is not installed", ONNX)
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / ONNX, providers=["CPUExecutionProvider"])

    def run_session(pixels: Tensor) -> Tensor:
        (features,) = session.run(None, {"pixels": pixels.numpy()})
        return torch.from_numpy(features)

    _compare(encoder, run_session, "onnxruntime")


def _random_pixels(encoder: Encoder) -> Tensor:
    """Return three images for a comparison, (3, 3, S, S) uint8."""
    size = encoder.preprocess.size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=generator)


def _compare(encoder: Encoder, other: Callable[[Tensor], Tensor], library: str) -> None:
    """Raise RuntimeError if another library computes other features."""
    pixels = _random_pixels(encoder)
    with torch.inference_mode():
        ours = encoder(pixels)
        theirs = other(pixels)
    assert ours.shape == theirs.shape
    largest = ours.abs().max().clamp_min(1e-30)
    difference = (ours - theirs).abs().max() / largest
    # Written with `not`, so that NaN counts as different.
    if not difference < _TOLERANCE:
        raise RuntimeError(f"{library} computes other features from the export (relative difference {difference:.2g})")


FORMATS = {
    "timm": _write_timm,
    "torchvision": _write_torchvision,
    "onnx": _write_onnx,
}
