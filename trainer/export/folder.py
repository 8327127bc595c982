"""Folder that `wmse export` writes: weights and config.json in timm's form, a README, and the other formats."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save
from torch import nn

import trainer
from trainer.config.schema import ModelConfig
from trainer.errors import InputError
from trainer.export.encoder import Encoder, Preprocess
from trainer.export.formats import FORMATS, NotPossibleError
from trainer.export.sources import CONFIG, KEY, WEIGHTS
from trainer.files import atomic_write, write_text
from trainer.run.commit import git_commit

_log = logging.getLogger(__name__)
_USE_ENCODER = """    from trainer.export import load_encoder
    encoder = load_encoder("THIS_FOLDER")
    result = encoder.features("FOLDER_OF_IMAGES")"""
_USE_CLASSIFIER = """    from trainer.export import load_classifier
    classifier = load_classifier("THIS_FOLDER")
    logits = classifier(pixels)        # uint8 (images, 3, {size}, {size}); classifier.class_names names the classes"""
_README = """# {title}

This folder holds {what}: RGB image of {size} x {size} pixels -> {result}.

{use}

Preprocessing: resize the shorter edge to {eval_resize} ({interpolation}), cut out the centre of {size} x {size}, scale to
0..1, subtract the mean {mean}, divide by {std}.{onnx}
The entry "wmse" of config.json says where the weights are from.
"""


def export(encoder: Encoder, dest: Path, format_name: str) -> list[str]:
    """Write the new folder `dest` and return its files. format_name: a key of FORMATS, or "all" for all possible ones.

    The folder always holds config.json and model.safetensors, which `load_encoder` reads. Raises InputError if it exists,
    or if the encoder cannot be written in the format."""
    with new_folder(dest) as folder:
        model = write_weights(encoder, folder)
        for name in FORMATS if format_name == "all" else [format_name]:
            try:
                FORMATS[name](encoder, model, folder)
            except NotPossibleError as error:
                if format_name != "all":
                    raise
                _log.warning("not written for %s: %s", name, error)
    return sorted(path.name for path in dest.iterdir())


@contextmanager
def new_folder(dest: Path) -> Iterator[Path]:
    """Give a temporary folder, which becomes `dest` when the block ends. If it raises, nothing is left behind.

    Raises InputError if `dest` exists."""
    if dest.exists():
        raise InputError(f"{dest} exists: give the name of a new folder")
    dest.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(dest)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            error.filename = str(dest)  # not a file in the folder that is gone
        raise


def write_weights(
    encoder: Encoder, folder: Path, head: nn.Linear | None = None, class_names: Sequence[str] = ()
) -> ModelConfig:
    """Write model.safetensors and config.json in the form of timm, with our own entry. Returns the settings of the model.

    head: classifier, whose weights are written with timm's names. class_names: its classes.
    Raises InputError if the encoder is not one of this program."""
    model = encoder.model
    if model is None:
        raise InputError(
            f"{encoder.name} is not an encoder of this program: give a run, a checkpoint or an exported folder"
        )
    facts = encoder.preprocess
    # What timm says of the architecture itself, beside the preprocessing of these weights.
    known = encoder.encoder.pretrained_cfg
    state = encoder.plain_state()
    of_head = {}
    if head:
        layer = known["classifier"]
        state |= {
            f"{layer}.weight": head.weight.detach().cpu(),
            f"{layer}.bias": head.bias.detach().cpu(),
        }
        of_head = {"head": layer, "class_names": list(class_names)}
    with atomic_write(folder / WEIGHTS) as file:
        file.write(save(state))
    pretrained = {
        "input_size": [3, facts.size, facts.size],
        "fixed_input_size": known.get("fixed_input_size", False),
        "interpolation": facts.interpolation,
        "crop_pct": crop_share(facts),
        "crop_mode": "center",
        "mean": facts.mean,
        "std": facts.std,
        "num_classes": len(class_names),
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
        "provenance": {
            **encoder.facts,
            "exported_by": f"{trainer.__version__}, commit {git_commit()}",
        },
        **of_head,
    }
    # With its own stem the network is not one that timm builds. timm then refuses this name, instead of building another.
    is_timms = model.stem == "imagenet"
    config = {
        "architecture": model.backbone if is_timms else f"{model.backbone} with stem {model.stem}: see README.md",
        "num_classes": len(class_names),
        "num_features": encoder.num_features,
        "pretrained_cfg": pretrained,
        KEY: own,
    }
    write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    readme = _README.format(
        title=encoder.name,
        what="a fine-tuned classifier" if head else "an encoder without a classifier",
        result=f"logits of {len(class_names)} classes" if head else f"{encoder.num_features} features",
        onnx="" if head else " `encoder.onnx`, if it is here, normalises by itself and takes uint8 pixels 0..255.",
        use=_USE_CLASSIFIER.format(size=facts.size) if head else _USE_ENCODER,
        **asdict(facts),
    )
    write_text(folder / "README.md", readme)
    return model


def crop_share(facts: Preprocess) -> float:
    """Return the crop_pct with which timm resizes the shorter edge to exactly eval_resize: it rounds size / crop_pct down."""
    share = facts.size / facts.eval_resize
    # A rounding error may make timm's result one pixel too small.
    while math.floor(facts.size / share) < facts.eval_resize:
        share = math.nextafter(share, 0)
    return share
