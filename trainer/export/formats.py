"""Write an encoder in formats that timm, torchvision and ONNX runtimes load. Each is loaded back and compared."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from safetensors.torch import save
from torch import Tensor, nn

import trainer
from trainer.config.schema import ModelConfig
from trainer.errors import InputError
from trainer.export.encoder import Encoder, Preprocess
from trainer.export.sources import CONFIG, KEY, WEIGHTS
from trainer.files import atomic_write, write_text
from trainer.run.commit import git_commit

ONNX = "encoder.onnx"
_TOLERANCE = 1e-4  # of the largest feature; other libraries may add up in another order
_OPSET = 18
_log = logging.getLogger(__name__)


class _NotPossibleError(InputError):
    """This encoder cannot be written in this format."""


def export(encoder: Encoder, dest: Path, format_name: str) -> list[str]:
    """Write the new folder `dest` and return its files. format_name: a key of FORMATS, or "all" for all possible ones.

    The folder always holds config.json and model.safetensors, which `load_encoder` reads. Raises InputError if it exists,
    or if the encoder cannot be written in the format."""
    if encoder.origin.model is None:
        raise InputError(
            f"{encoder.name} is not an encoder of this program: give a run, a checkpoint or an exported folder"
        )
    if dest.exists():
        raise InputError(f"{dest} exists: give the name of a new folder")
    dest.parent.mkdir(parents=True, exist_ok=True)
    # A failed export leaves nothing behind: the folder gets its name when everything is in it.
    temporary = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    try:
        _write_weights(encoder, encoder.origin.model, temporary)
        names = list(FORMATS) if format_name == "all" else [format_name]
        for name in names:
            try:
                FORMATS[name](encoder, encoder.origin.model, temporary)
            except _NotPossibleError as error:
                if format_name != "all":
                    raise
                _log.warning("not written for %s: %s", name, error)
        temporary.chmod(0o755)
        temporary.rename(dest)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sorted(path.name for path in dest.iterdir())


def _write_weights(encoder: Encoder, model: ModelConfig, folder: Path) -> None:
    """Write model.safetensors and config.json in the form of timm, with our own entry."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.encoder.state_dict().items()}
    with atomic_write(folder / WEIGHTS) as file:
        file.write(save(state))
    facts = encoder.preprocess
    known = encoder.encoder.pretrained_cfg
    pretrained = {
        "input_size": [3, facts.size, facts.size],
        "fixed_input_size": known.get("fixed_input_size", False),
        "interpolation": facts.interpolation,
        "crop_pct": crop_share(facts),
        "crop_mode": "center",
        "mean": facts.mean,
        "std": facts.std,
        "num_classes": 0,
        "first_conv": known.get("first_conv"),
        "classifier": known.get("classifier"),
    }
    own = {
        "name": encoder.name,
        "backbone": model.backbone,
        "stem": model.stem,
        "preprocess": asdict(facts),
        "onnx_input": "pixels: uint8 (N, 3, size, size), RGB, 0..255; the graph normalises them",
        "class_names": encoder.class_names,
        "sha256": encoder.sha256,
        "provenance": {**encoder.origin.facts, "exported_by": f"{trainer.__version__}, commit {git_commit()}"},
    }
    # With its own stem the network is not one that timm builds. timm then refuses this name, instead of building another.
    is_timms = model.stem == "imagenet"
    config = {
        "architecture": model.backbone if is_timms else f"{model.backbone} with stem {model.stem}: see README.md",
        "num_classes": 0,
        "num_features": encoder.num_features,
        "pretrained_cfg": pretrained,
        KEY: own,
    }
    write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    readme = _README.format(title=encoder.name, f=encoder.num_features, **asdict(facts))
    write_text(folder / "README.md", readme)


def crop_share(facts: Preprocess) -> float:
    """Return the crop_pct with which timm resizes the shorter edge to exactly eval_resize: it rounds size / crop_pct down."""
    share = facts.size / facts.eval_resize
    while math.floor(facts.size / share) < facts.eval_resize:
        share = math.nextafter(share, 0)
    return share


def _write_timm(encoder: Encoder, model: ModelConfig, folder: Path) -> None:
    """Check that timm loads the folder as it is."""
    if model.stem != "imagenet":
        raise _NotPossibleError(
            f"timm has no ResNet with model.stem {model.stem}: use --format onnx, or --format all, whose folder "
            "trainer.export.load_encoder loads; docs/export.md shows how to build it from timm in four lines"
        )
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    _compare(encoder, lambda pixels: network(encoder.normalize(pixels)), "timm")


def _write_torchvision(encoder: Encoder, model: ModelConfig, folder: Path) -> None:
    """Write a state dict with torchvision's names, if torchvision has this network."""
    # timm and torchvision give these networks the same names, in every module.
    network: Any = None
    if (
        model.backbone in torchvision.models.list_models()
        and timm.models.model_entrypoint(model.backbone).__module__ == "timm.models.resnet"
    ):
        network = torchvision.models.get_model(model.backbone, weights=None)
    if network is None or model.stem != "imagenet":
        raise _NotPossibleError(
            f"torchvision has no {model.backbone} with model.stem {model.stem}, only ResNets with the stem imagenet: use "
            "--format onnx, or --format all, whose folder trainer.export.load_encoder loads"
        )
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.encoder.state_dict().items()}
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
        raise _NotPossibleError(f"the ONNX export needs {' and '.join(missing)}: run `pip install {' '.join(missing)}`")
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
    _compare(encoder, lambda pixels: torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0]), "onnxruntime")


def _random_pixels(encoder: Encoder) -> Tensor:
    size = encoder.preprocess.size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=generator)


def _compare(encoder: Encoder, other: Callable[[Tensor], Tensor], library: str) -> None:
    """Raise RuntimeError if another library computes other features."""
    pixels = _random_pixels(encoder)
    with torch.inference_mode():
        ours, theirs = encoder(pixels), other(pixels)
    difference = (ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-30)
    if ours.shape != theirs.shape or not difference < _TOLERANCE:
        raise RuntimeError(f"{library} computes other features from the export (relative difference {difference:.2g})")


FORMATS = {"timm": _write_timm, "torchvision": _write_torchvision, "onnx": _write_onnx}

_README = """# {title}

Image encoder without a classifier: RGB image of {size} x {size} pixels -> {f} features.

    from trainer.export import load_encoder
    encoder = load_encoder("THIS_FOLDER")
    result = encoder.features("FOLDER_OF_IMAGES")

Preprocessing: resize the shorter edge to {eval_resize} ({interpolation}), cut out the centre of {size} x {size}, scale to
0..1, subtract the mean {mean}, divide by {std}. `encoder.onnx` normalises by itself and takes uint8 pixels 0..255.
The entry "wmse" of config.json says where the weights are from.
"""
