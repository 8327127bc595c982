"""Load an encoder from a run, a checkpoint, an exported folder, timm, torchvision, or weights of another program."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.config.setting import all_settings, shapes_result
from trainer.errors import InputError
from trainer.export.encoder import Encoder, Preprocess
from trainer.export.libraries import load_timm, load_torchvision
from trainer.export.state_dicts import read_weights
from trainer.models.encoder import build_encoder
from trainer.run.checkpoint import choose_checkpoint, load_checkpoint, put_encoder

KEY = "wmse"  # our entry in an exported config.json, which timm ignores
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_SOURCES = (
    "a run folder, a checkpoint file, an exported folder, timm:NAME or torchvision:NAME (pretrained weights), "
    "timm:NAME=FILE or torchvision:NAME=FILE (weights of another program)"
)
# Settings that build an encoder.
_SETTINGS = ("model.backbone", "model.stem", *(f"views.{field.name}" for field in dataclasses.fields(Preprocess)))


def load_encoder(
    source: str | Path, device: str | torch.device = "cpu", preprocess: Preprocess | None = None
) -> Encoder:
    """Load an encoder, ready for use.

    source: as docs/export.md lists them; of a run, the last checkpoint.
    preprocess: replaces what the source says, or for weights of another program what timm or torchvision says.

    Raises InputError if the source does not exist or does not hold one encoder. Files are only read as data."""
    # timm:NAME, torchvision:NAME=FILE, or a path.
    kind, _, rest = str(source).partition(":")
    if kind in ("timm", "torchvision") and rest:
        name, _, file = rest.partition("=")
        load = load_timm if kind == "timm" else load_torchvision
        encoder = load(name, Path(file) if file else None)
    else:
        encoder = _load_path(Path(source).expanduser())
    if preprocess is not None:
        encoder.set_preprocess(preprocess)
    return encoder.freeze().to(device)


def _load_path(path: Path) -> Encoder:
    # Only an exported folder has a config.json; a run folder has a config.yaml.
    if (path / CONFIG).is_file():
        return _load_folder(path)
    if path.is_dir():
        return _load_checkpoint(choose_checkpoint(path, "last"))
    if not path.exists():
        raise InputError(f"there is no encoder {str(path)!r}: give {_SOURCES}")
    try:
        return _load_checkpoint(path)
    except InputError as error:
        raise InputError(
            f"{error}; weights of another program need their architecture, as in timm:resnet50={path}"
        ) from error


def _load_checkpoint(path: Path) -> Encoder:
    content = load_checkpoint(path)
    settings = content.get("config")
    if not isinstance(settings, dict):
        raise InputError(f"cannot use checkpoint {path}: it holds no settings")
    # An export may be published, so it does not name folders and other settings of the machine.
    shaping = {key for key, declared, _ in all_settings(Config()) if shapes_result(declared)}
    facts = {
        "checkpoint_sha256": content["sha256"],
        "step": content["step"],
        "method": settings.get("method"),
        "settings": {key: settings[key] for key in sorted(shaping & settings.keys())},
    }
    name = f"{settings.get('model.backbone')} of step {content['step']}"
    encoder = _build(settings, path, name, content.get("class_names"), facts)
    put_encoder(encoder, content["model"], path)
    return encoder


def _build(
    settings: dict[str, Any], path: Path, name: str, class_names: list[str] | None, facts: dict[str, Any]
) -> Encoder:
    """Build an encoder as a run does, without its weights, and without the memory options of the training.

    settings: by dotted name; a missing one has its default value. Raises InputError naming `path` for a wrong value."""
    # Words of a command line are checked for types and ranges.
    # The checkpoint says which encoder it holds.
    words = [f"--{key}={settings[key]}" for key in _SETTINGS if key in settings]
    try:
        config = load_config(None, words, check_method=False)
        backbone = build_encoder(config.model, config.views)
    except InputError as error:
        raise InputError(f"cannot build the encoder of {path}: {error}") from error
    views = config.views
    preprocess = Preprocess(
        size=views.size,
        eval_resize=views.eval_resize,
        interpolation=views.interpolation,
        mean=views.mean,
        std=views.std,
    )
    return Encoder(
        backbone,
        preprocess,
        name,
        model=config.model,
        class_names=class_names,
        facts=facts,
    )


def _load_folder(folder: Path) -> Encoder:
    """Load a folder that `wmse export` wrote, or another one that timm loads."""
    path = folder / CONFIG
    try:
        own = json.loads(path.read_bytes()).get(KEY)
        if own is None:
            return load_timm(str(folder), None)
        settings = {"model.backbone": own["backbone"], "model.stem": own["stem"]}
        settings |= {f"views.{key}": value for key, value in own["preprocess"].items()}
        encoder = _build(settings, path, own["name"], own["class_names"], own["provenance"])
        digest = own["sha256"]
    except InputError:  # which is a ValueError
        raise
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise InputError(f"{path} is not what `wmse export` wrote ({error!r}): export the encoder again") from error
    weights = folder / WEIGHTS
    # The file has timm's names, and a run's network has them below `encoder`. A classifier is no part of the encoder.
    head = f"{own.get('head')}."
    state = {f"encoder.{name}": tensor for name, tensor in read_weights(weights).items() if not name.startswith(head)}
    put_encoder(encoder, state, weights)
    # Other weights would fit the same architecture, so the digest is compared as well.
    if encoder.freeze().sha256 != digest:
        raise InputError(f"the weights in {weights} are not those that {CONFIG} names: export the encoder again")
    return encoder
