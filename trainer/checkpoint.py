"""Checkpoints: everything that a run needs to go on, as plain tensors and values, written so that none is ever torn.

A file is a dict that `torch.load(weights_only=True)` reads:
    format, step (updates made), model (plain names: encoder.*, projector.*), optimizer, config (dotted name: value),
    plan_version, data (fingerprint of the training split, number of images), world_size, loss_sums (of the open log line)
"""

from __future__ import annotations

import logging
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.errors import InputError
from trainer.files import atomic_write

FORMAT = 1
_log = logging.getLogger(__name__)
_NAME = re.compile(r"step_(\d{8,})\.pt")
_PREFIXES = ("module.", "_orig_mod.")  # what DDP and torch.compile put before names


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}.pt"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """All checkpoints as (step, file), oldest first by the number in the name."""
    found = ((_NAME.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[1]), path) for match, path in found if match)


def save_checkpoint(folder: Path, content: dict[str, Any], keep_last: int) -> Path:
    """Write the checkpoint of content["step"], then delete all but the newest `keep_last`."""
    folder.mkdir(parents=True, exist_ok=True)
    for rest in folder.glob(".step_*"):  # of a save that was killed
        rest.unlink()
    path = checkpoint_path(folder, content["step"])
    with atomic_write(path) as file:
        torch.save({"format": FORMAT, **content}, file)
    for _, old in list_checkpoints(folder)[:-keep_last]:
        old.unlink()
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of one file, on the CPU. Raises InputError where it is missing, broken or of another format."""
    if not path.is_file():
        raise InputError(f"no checkpoint {path}")
    if not zipfile.is_zipfile(path):  # torch would take it for its format of before 2020 and fail in many ways
        raise InputError(f"can't read checkpoint {path}: it is cut off, damaged or not one")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"can't read checkpoint {path}: {reason}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "model" not in content:
        raise InputError(f"{path} is no checkpoint of this program (format {FORMAT} expected)")
    content["model"] = plain_names(content["model"])
    return content


def load_newest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read; broken ones are named and passed over. None where there is none at all.

    Raises InputError where there are files but not one can be read: starting afresh would overwrite what may be saved."""
    found = list_checkpoints(folder)
    for _, path in reversed(found):
        try:
            return load_checkpoint(path)
        except InputError as error:
            _log.warning("%s; trying the one before", error)
    if found:
        raise InputError(
            f"none of the {len(found)} checkpoints in {folder} can be read; move them away to start afresh"
        )
    return None


def choose_checkpoint(run_dir: Path, which: str) -> Path:
    """The file that `which` names: "last", a step's number, or a path. Raises InputError where there is none."""
    found = list_checkpoints(run_dir / "checkpoints")
    if which == "last":
        if not found:
            raise InputError(f"no checkpoint in {run_dir / 'checkpoints'}: has the run saved one yet?")
        return found[-1][1]
    if which.isdigit():
        path = checkpoint_path(run_dir / "checkpoints", int(which))
        if not path.exists():
            raise InputError(
                f"no checkpoint of step {which} in {run_dir}; there are: {', '.join(str(s) for s, _ in found)}"
            )
        return path
    return Path(which)


def plain_names(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict without the prefixes of DDP and torch.compile."""
    return {_strip(name): value for name, value in state.items()}


def _strip(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("._orig_mod.", ".")


def model_state(model: nn.Module) -> dict[str, Any]:
    """The model's tensors under plain names, each with storage of its own (BatchNorm's statistics share one)."""
    return {name: value.detach().cpu().clone() for name, value in plain_names(model.state_dict()).items()}


def load_encoder(model: nn.Module, path: Path) -> None:
    """Put the encoder of another run's checkpoint into `model` (plain, not wrapped); the projector stays as it is.

    Raises InputError naming the tensors where the encoders differ."""
    state = load_checkpoint(path)["model"]
    wanted = {name: value for name, value in model.state_dict().items() if name.startswith("encoder.")}
    given = {name: value for name, value in state.items() if name.startswith("encoder.")}
    wrong = [
        n for n in sorted(wanted | given) if n not in wanted or n not in given or wanted[n].shape != given[n].shape
    ]
    if wrong:
        raise InputError(
            f"the encoder in {path} is not that of this config: {len(wrong)} tensors differ, first {', '.join(wrong[:3])}; "
            "model.backbone and model.stem must be the same"
        )
    model.load_state_dict(given, strict=False)
