"""Folder that `wmse export` writes: weights and config.json in timm's form, a README, and the other formats."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save

import trainer
from trainer.config.schema import ModelConfig
from trainer.errors import InputError
from trainer.export.encoder import Encoder, Preprocess
from trainer.export.formats import FORMATS, NotPossibleError
from trainer.export.sources import CONFIG, KEY, WEIGHTS
from trainer.files import atomic_write, write_text
from trainer.run.commit import git_commit

_log = logging.getLogger(__name__)
_README = """# {title}

Image encoder without a classifier: RGB image of {size} x {size} pixels -> {f} features.

    from trainer.export import load_encoder
    encoder = load_encoder("THIS_FOLDER")
    result = encoder.features("FOLDER_OF_IMAGES")

Preprocessing: resize the shorter edge to {eval_resize} ({interpolation}), cut out the centre of {size} x {size}, scale to
0..1, subtract the mean {mean}, divide by {std}. `encoder.onnx` normalises by itself and takes uint8 pixels 0..255.
The entry "wmse" of config.json says where the weights are from.
"""


def export(encoder: Encoder, dest: Path, format_name: str) -> list[str]:
    """Write the new folder `dest` and return its files. format_name: a key of FORMATS, or "all" for all possible ones.

    The folder always holds config.json and model.safetensors, which `load_encoder` reads. Raises InputError if it exists,
    or if the encoder cannot be written in the format."""
    model = encoder.model
    if model is None:
        raise InputError(
            f"{encoder.name} is not an encoder of this program: give a run, a checkpoint or an exported folder"
        )
    if dest.exists():
        raise InputError(f"{dest} exists: give the name of a new folder")
    dest.parent.mkdir(parents=True, exist_ok=True)
    # A failed export leaves nothing behind: the folder gets its name when everything is in it.
    temporary = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    try:
        _write_weights(encoder, model, temporary)
        for name in FORMATS if format_name == "all" else [format_name]:
            try:
                FORMATS[name](encoder, model, temporary)
            except NotPossibleError as error:
                if format_name != "all":
                    raise
                _log.warning("not written for %s: %s", name, error)
        temporary.chmod(0o755)
        temporary.rename(dest)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            error.filename = str(dest)  # not a file in the folder that is gone
        raise
    return sorted(path.name for path in dest.iterdir())


def _write_weights(encoder: Encoder, model: ModelConfig, folder: Path) -> None:
    """Write model.safetensors and config.json in the form of timm, with our own entry."""
    with atomic_write(folder / WEIGHTS) as file:
        file.write(save(encoder.plain_state()))
    facts = encoder.preprocess
    # What timm says of the architecture itself, beside the preprocessing of these weights.
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
    # What `load_encoder` needs to build the encoder again, and where the weights are from.
    own = {
        "name": encoder.name,
        "backbone": model.backbone,
        "stem": model.stem,
        "preprocess": asdict(facts),
        "onnx_input": "pixels: uint8 (N, 3, size, size), RGB, 0..255; the graph normalises them",
        "class_names": encoder.class_names,
        "sha256": encoder.sha256,
        "provenance": {**encoder.facts, "exported_by": f"{trainer.__version__}, commit {git_commit()}"},
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
    # A rounding error may make timm's result one pixel too small.
    while math.floor(facts.size / share) < facts.eval_resize:
        share = math.nextafter(share, 0)
    return share
