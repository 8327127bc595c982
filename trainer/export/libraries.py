"""Encoders of timm and torchvision, with pretrained weights or with those of a file."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import timm
import torchvision
from torch import nn

from trainer.errors import InputError
from trainer.export.encoder import Encoder, Preprocess
from trainer.export.state_dicts import find_encoder, first_line, read_weights

_log = logging.getLogger(__name__)


def load_timm(name: str, file: Path | None) -> Encoder:
    """Load a model of timm, by name or from a folder that timm saved. file: weights of another program for it."""
    # A folder that happens to have the name of a model does not count.
    is_model = timm.is_model(name)
    if not is_model and not (name and Path(name).is_dir()):
        raise InputError(f"timm has no model {name!r}: choose a name of timm.list_models()")
    full_name = name if is_model else f"local-dir:{name}"
    try:
        backbone = timm.create_model(full_name, pretrained=file is None, num_classes=0)
    except Exception as error:  # anything from no network to a file that does not fit
        advice = f"Without a network, give a file: timm:{name}=FILE" if is_model else "Save the folder again"
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"timm cannot load the weights of {name}: {reason}. {advice}") from error
    # How the weights were evaluated, as timm documents it for this model.
    facts = timm.data.resolve_model_data_config(backbone)
    interpolation = facts["interpolation"]
    if facts["crop_mode"] != "center" or interpolation not in ("bicubic", "bilinear"):
        _log.warning(
            "%s was trained with crop mode %s and %s interpolation; images get a centre crop, interpolated bicubically if "
            "not bilinearly",
            name,
            facts["crop_mode"],
            interpolation,
        )
    size = facts["input_size"][-1]
    preprocess = _preprocess(
        size=size,
        # timm rounds down as well.
        eval_resize=math.floor(size / facts["crop_pct"]),
        interpolation=interpolation,
        mean=facts["mean"],
        std=facts["std"],
    )
    return _filled(backbone, f"timm:{name}", file, preprocess)


def load_torchvision(name: str, file: Path | None) -> Encoder:
    """Load a model of torchvision by name. file: weights of another program for it."""
    if name not in torchvision.models.list_models(torchvision.models):
        raise InputError(
            f"torchvision has no classifier {name!r}: choose a name of torchvision.models.list_models(torchvision.models)"
        )
    weights = torchvision.models.get_model_weights(name).DEFAULT
    try:
        backbone: Any = torchvision.models.get_model(name, weights=weights if file is None else None)
    except (OSError, RuntimeError) as error:  # no network, or a damaged download
        raise InputError(
            f"torchvision cannot get the weights of {name}: {error}. Give a file: torchvision:{name}=FILE"
        ) from error
    if not isinstance(getattr(backbone, "fc", None), nn.Linear):
        raise InputError(f"the torchvision model {name} has no classifier named fc: use the same model of timm")
    # As in a backbone of timm: its number of features, and no classifier.
    backbone.num_features = backbone.fc.in_features
    backbone.fc = nn.Identity()
    facts = weights.transforms()
    size = facts.crop_size[0]
    # Other programs evaluate with the usual 256:224, torchvision's newer weights with a tighter resize.
    resize = facts.resize_size[0] if file is None else round(size * 256 / 224)
    preprocess = _preprocess(
        size=size,
        eval_resize=resize,
        interpolation=facts.interpolation.value,
        mean=facts.mean,
        std=facts.std,
    )
    return _filled(backbone, f"torchvision:{name}", file, preprocess)


def _preprocess(*, size: int, eval_resize: int, interpolation: str, mean: Any, std: Any) -> Preprocess:
    """Return the preprocessing that a library documents. An interpolation that this program lacks becomes bicubic."""
    return Preprocess(
        size=size,
        eval_resize=eval_resize,
        interpolation="bilinear" if interpolation == "bilinear" else "bicubic",
        mean=tuple(mean),
        std=tuple(std),
    )


def _filled(backbone: Any, name: str, file: Path | None, preprocess: Preprocess) -> Encoder:
    """Return the encoder with the weights of the file, or with those that the backbone has."""
    if file is None:
        return Encoder(backbone, preprocess, name)
    encoder = Encoder(backbone, preprocess, f"{name}={file.name}")
    found = find_encoder(read_weights(file), backbone.state_dict(), file)
    # All names and shapes were compared. A strict load would ask for the counters of batches.
    backbone.load_state_dict(found, strict=False)
    return encoder
