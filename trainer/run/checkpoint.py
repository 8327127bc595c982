"""Checkpoints: everything that a run needs to go on, as plain tensors and values, written so that none is ever torn.

A file is a dict that `torch.load(weights_only=True)` reads:
    format, step (updates made), model (plain names: encoder.*, projector.*), optimizer, config (dotted name: value),
    plan_version, data (fingerprint of the training split, number of images), world_size, metric_sums (since the last log line),
    loss_scale (of fp16, else None),
    sha256 (of all the rest, see `content_digest`)
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import zipfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from trainer.errors import InputError, TrainingFailedError
from trainer.files import atomic_write
from trainer.run.checkpoint_check import first_not_finite
from trainer.run.checkpoint_files import checkpoint_path, list_checkpoints, step_of

FORMAT = 3
_READABLE = (2, FORMAT)  # encoders of format 2 are those of today
_log = logging.getLogger(__name__)
_PREFIXES = ("module.", "_orig_mod.")  # what DDP and torch.compile put before names
# what a safe load raises of a file with flipped bytes (each was tried in a small one); MemoryError is not among them
_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(OverflowError, pickle.UnpicklingError, zipfile.BadZipFile),
)


def save_checkpoint(folder: Path, content: dict[str, Any], keep_last: int, kept_steps: Container[int] = ()) -> Path:
    """Write the checkpoint of content["step"]; once it is safely in place, delete those before it but for the newest
    `keep_last` (this one counts) and those of `kept_steps`.

    The folder is made if missing, but not its parents. Raises OSError if the file can't be written and TrainingFailedError for
    weights or moments that are not finite (the older checkpoints stay untouched), TypeError for content that is neither tensors
    nor plain values."""
    broken = first_not_finite({name: content.get(name) for name in ("model", "optimizer")}, "checkpoint")
    if broken:
        raise TrainingFailedError(
            f"nothing was saved at step {content['step']}: {broken} is not finite, and a run can't continue from that. The "
            f"checkpoints in {folder} are untouched: continue from them with a smaller optimizer.learning_rate, a longer "
            "warm-up, wmse.eps 1e-4, or precision fp32"
        )
    folder.mkdir(exist_ok=True)  # without parents: a run folder that has gone is a disk that has gone
    for rest in folder.glob(".step_*"):  # of a save that was killed
        _delete(rest)
    whole = {**content, "format": FORMAT, "model": plain_names(content["model"])}
    whole = map_tensors(whole, lambda _, tensor: tensor.detach())
    whole["sha256"] = content_digest(whole)
    path = checkpoint_path(folder, content["step"])
    with atomic_write(path) as file:
        _write(whole, file)
    for old_step, old in [(s, p) for s, p in list_checkpoints(folder) if s <= content["step"]][:-keep_last]:
        if old_step not in kept_steps:
            _delete(old)
    return path


def _delete(path: Path) -> None:
    """Delete an old file; a failure only costs disk space, so it is only logged."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("can't delete the old %s: %s", path, error.strerror)


def _write(content: dict[str, Any], file: BinaryIO) -> None:
    """torch.save. Raises the OSError of the file's first write that failed."""
    into = _NeverFails(file)
    torch.save(content, into)  # type: ignore[arg-type] # it asks for write and flush only
    if into.error is not None:
        raise into.error


class _NeverFails:
    """Keeps the first OSError of a file and drops what is written after it.

    torch's zip writer would turn an OSError (a full disk) into a RuntimeError about positions in the file. Writing to a buffer
    in memory instead takes 1.7 times as long (229 MB)."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """`atomic_write` flushes, where a failure is seen."""


def map_tensors(value: Any, change: Callable[[tuple[Any, ...], Tensor], Tensor], path: tuple[Any, ...] = ()) -> Any:
    """The same nested dicts, lists and tuples anew, every tensor replaced by change(path, tensor).

    Raises TypeError for what a safe load would refuse: anything but these, tensors, and plain values."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change, (*path, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change, (*path, number)) for number, item in enumerate(value))
    if type(value) in (bool, int, float, str, type(None)):
        return value
    where = ".".join(map(str, path))
    raise TypeError(f"a checkpoint holds tensors and plain values only, not a {type(value).__name__} as {where}")


def content_digest(content: dict[str, Any]) -> str:
    """SHA-256 over all of a checkpoint but its own "sha256", as a hex string: of every tensor its place, dtype, shape and
    bytes, of every value its place and repr. The order of a dict's keys does not count, nor tuple or list."""
    digest = hashlib.sha256()
    _feed(digest, {key: value for key, value in content.items() if key != "sha256"}, ())
    return digest.hexdigest()


def _feed(digest: Any, value: Any, path: tuple[Any, ...]) -> None:
    if isinstance(value, Tensor):
        dense = value.detach()
        strides = dense.stride()
        order = sorted(range(dense.dim()), key=lambda axis: -strides[axis])  # channels_last is not copied
        data = dense.permute(order).contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(f"{path!r} {dense.dtype} {tuple(dense.shape)} {order}\n".encode())
        digest.update(data)  # without the GIL
    elif isinstance(value, dict):
        digest.update(f"{path!r} dict of {len(value)}\n".encode())
        for key in sorted(value, key=repr):
            _feed(digest, value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        digest.update(f"{path!r} list of {len(value)}\n".encode())
        for number, item in enumerate(value):
            _feed(digest, item, (*path, number))
    else:
        digest.update(f"{path!r} {value!r}\n".encode())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load one file to the CPU. Raises InputError if it is missing, damaged, of another format, not what was saved, or holds
    numbers that are not finite."""
    if not path.is_file():
        raise InputError(f"no checkpoint {path}")
    try:
        content, digest = _read(path)
    except InputError:
        raise
    except _UNREADABLE as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"can't read checkpoint {path}: {reason}") from error
    if content.get("sha256") != digest:
        raise InputError(
            f"can't read checkpoint {path}: its content is not what was saved "
            f"(sha256 {digest[:16]}..., saved {str(content.get('sha256'))[:16]}...)"
        )
    broken = first_not_finite({name: content.get(name) for name in ("model", "optimizer")}, "checkpoint")
    if broken:
        raise InputError(f"can't use checkpoint {path}: {broken} holds numbers that are not finite")
    named = plain_names(content["model"])
    # older checkpoints hold BatchNorm's number of batches, which nothing reads
    content["model"] = {name: value for name, value in named.items() if not name.endswith(".num_batches_tracked")}
    return content


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return the content and its digest."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):  # torch would take it for its format of before 2020 and fail in many ways
            raise InputError(f"can't read checkpoint {path}: it is cut off, damaged or not one")
    content = torch.load(path, map_location="cpu", weights_only=True)
    found = content.get("format") if isinstance(content, dict) else None
    model = content.get("model") if isinstance(content, dict) else None
    if found not in _READABLE or not isinstance(model, dict):
        raise InputError(f"{path} is no checkpoint of this program (format {FORMAT} expected, found {found})")
    odd = [name for name, value in model.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if odd:
        raise InputError(f"can't use checkpoint {path}: its model holds {odd[0]!r}, which is not a tensor with a name")
    step, named = content.get("step"), step_of(path)
    if type(step) is not int or step < 0 or named not in (None, step):
        raise InputError(f"can't use checkpoint {path}: it says that it holds step {step!r}")
    return content, content_digest(content)


def load_newest(folder: Path, check: Callable[[dict[str, Any]], None] = lambda content: None) -> dict[str, Any] | None:
    """Load the newest usable checkpoint; log each newer one that is skipped, and why. None if there are no checkpoints.

    check: raises InputError if the content can't be used. Raises InputError if there are files but none is usable: a fresh
    start would overwrite work that may still be recovered."""
    found = list_checkpoints(folder)
    reasons = []
    for _, path in reversed(found):
        try:
            content = load_checkpoint(path)
            check(content)
            return content
        except InputError as error:
            reasons.append(str(error))
            _log.warning("skipped %s: %s", path.name, error)
    if found:
        raise InputError(
            f"none of the {len(found)} checkpoints in {folder} can be used. The newest: {reasons[0]}\n"
            "Move them away to start afresh, or take another --run_dir"
        )
    return None


def choose_checkpoint(run_dir: Path, which: str) -> Path:
    """Return the file that `which` names: "last", a step, or a path. Raises InputError if there is none."""
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
    while name.startswith(_PREFIXES):  # in either order
        name = name.partition(".")[2]
    return name.replace("._orig_mod.", ".")


def load_encoder(model: nn.Module, path: Path) -> None:
    """Put the encoder of another run's checkpoint into `model` (plain, not wrapped); the projector stays as it is."""
    put_encoder(model, load_checkpoint(path)["model"], path)


def put_encoder(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Put the encoder of a loaded checkpoint's model state into `model`. path: for messages.

    Raises InputError naming the tensors where the encoders differ."""
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
