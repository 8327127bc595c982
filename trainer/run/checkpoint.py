"""Checkpoints: everything that a run needs to continue, as plain tensors and values. Each file is written atomically.

A file is a dict that `torch.load(weights_only=True)` reads:
    format          version of this layout
    step            updates made
    model           state dict with plain names: encoder.*, projector.*
    optimizer       state dict
    config          dotted name: value
    plan_version    version of the random choices of a step
    data            fingerprint of the training split, number of images
    class_names     names of its classes, empty without classes; missing in older files
    world_size      number of ranks
    metric_sums     sums since the last logged line
    digests         of all rows and of all logged means so far, see `digests`; missing in older files
    loss_scale      state of the fp16 loss scale, else None
    online_probe    state of the online probe, else None
    cost            account of the run so far, see `cost`; missing in older files
    sha256          digest of all the other entries, see `content_digest`
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
_READABLE = (2, FORMAT)  # format 2 has the same encoders
_log = logging.getLogger(__name__)
_PREFIXES = ("module.", "_orig_mod.")  # added to parameter names by DDP and torch.compile
# Errors that a safe load raised for a small file with flipped bytes. MemoryError is not one of them.
_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(OverflowError, pickle.UnpicklingError, zipfile.BadZipFile),
)


def save_checkpoint(folder: Path, content: dict[str, Any], keep_last: int, kept_steps: Container[int] = ()) -> Path:
    """Write the checkpoint of content["step"], then delete older checkpoints. Returns the path of the new file.

    keep_last: number of newest checkpoints to keep, this one included. kept_steps: steps whose checkpoints are never
    deleted.

    Creates the folder if it is missing, but not its parents. Raises OSError if the file cannot be written,
    TrainingFailedError if weights or moments are not finite (older checkpoints stay untouched), and TypeError if the
    content holds anything but tensors and plain values."""
    step = content["step"]
    broken = _first_not_finite(content)
    if broken:
        raise TrainingFailedError(
            f"the checkpoint of step {step} was not saved: {broken} is not finite, and a run cannot continue from it. The "
            f"checkpoints in {folder} are untouched: continue from them with a smaller optimizer.learning_rate, a longer "
            "warm-up, or precision fp32"
        )
    # If even the run folder is missing, its disk is gone: do not create the parents on another disk.
    folder.mkdir(exist_ok=True)
    # Delete the temporary files of saves that were killed.
    for temporary in folder.glob(".step_*"):
        _delete(temporary)
    # Parameters become plain tensors, because a safe load refuses anything else.
    complete = {
        **content,
        "format": FORMAT,
        "model": plain_names(content["model"]),
    }
    complete = map_tensors(complete, lambda _, tensor: tensor.detach())
    complete["sha256"] = content_digest(complete)
    path = checkpoint_path(folder, step)
    with atomic_write(path) as file:
        _write(complete, file)
    # The new file is safely on the disk, so older ones may go. Files of later steps belong to an earlier start of the run.
    up_to_now = [(old_step, old) for old_step, old in list_checkpoints(folder) if old_step <= step]
    for old_step, old in up_to_now[:-keep_last]:
        if old_step not in kept_steps:
            _delete(old)
    return path


def _first_not_finite(content: dict[str, Any]) -> str | None:
    """Return the name of the first weight or moment that is not finite; None if all are finite."""
    checked = {name: content.get(name) for name in ("model", "optimizer")}
    return first_not_finite(checked, "checkpoint")


def _delete(path: Path) -> None:
    """Delete an old file. A failure only wastes disk space: log it and continue."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot delete the old file %s: %s", path, error.strerror)


def _write(content: dict[str, Any], file: BinaryIO) -> None:
    """Write a checkpoint with torch.save. Raises the OSError of the first write that failed."""
    target = _ErrorKeeper(file)
    torch.save(content, target)  # type: ignore[arg-type] # torch.save only calls write and flush
    if target.error is not None:
        raise target.error


class _ErrorKeeper:
    """File wrapper that keeps the first OSError of a write and ignores all later writes.

    torch's zip writer would turn an OSError (a full disk) into a RuntimeError about positions in the file. Writing to a
    buffer in memory first takes 1.7 times as long (229 MB)."""

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
        """Do nothing: `atomic_write` flushes the file and raises its errors."""


def map_tensors(value: Any, change: Callable[[tuple[Any, ...], Tensor], Tensor], path: tuple[Any, ...] = ()) -> Any:
    """Copy nested dicts, lists and tuples, with every tensor replaced by change(path, tensor).

    path: keys and indices that lead to `value`. Raises TypeError for anything that a safe load would refuse: anything
    but these containers, tensors and plain values."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change, (*path, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [map_tensors(item, change, (*path, number)) for number, item in enumerate(value)]
        return type(value)(items)
    if type(value) in (bool, int, float, str, type(None)):
        return value
    where = ".".join(map(str, path))
    raise TypeError(f"a checkpoint holds tensors and plain values only, not a {type(value).__name__} as {where}")


def content_digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint without its "sha256" entry, as a hex string.

    Covers the path, dtype, shape and bytes of every tensor, and the path and repr of every value. The order of keys does
    not change it, and a tuple counts as a list."""
    digest = hashlib.sha256()
    rest = {key: value for key, value in content.items() if key != "sha256"}
    _feed(digest, rest, ())
    return digest.hexdigest()


def _feed(digest: Any, value: Any, path: tuple[Any, ...]) -> None:
    """Update the digest with a value and everything inside it."""
    if isinstance(value, Tensor):
        # Read the elements in the order of memory, so that a channels_last tensor needs no copy.
        dense = value.detach()
        strides = dense.stride()
        order = sorted(range(dense.dim()), key=lambda axis: -strides[axis])
        in_memory_order = dense.permute(order).contiguous()
        data = in_memory_order.view(-1).view(torch.uint8).numpy()
        head = f"{path!r} {dense.dtype} {tuple(dense.shape)} {order}\n"
        digest.update(head.encode())
        digest.update(data)  # hashlib releases the GIL here
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
    """Load one checkpoint to the CPU.

    Raises InputError if the file is missing or damaged, has another format or another content than was saved, or holds
    numbers that are not finite."""
    if not path.is_file():
        raise InputError(f"the checkpoint {path} does not exist")
    try:
        content, digest = _read(path)
    except InputError:
        raise
    except _UNREADABLE as error:
        message = str(error).strip()
        reason = message.splitlines()[0] if message else type(error).__name__
        raise InputError(f"cannot read checkpoint {path}: {reason}") from error
    # A changed bit may leave a file that loads without an error. Only the digest shows it.
    saved_digest = content.get("sha256")
    if saved_digest != digest:
        raise InputError(
            f"cannot read checkpoint {path}: its content is not what was saved "
            f"(sha256 {digest[:16]}..., saved {str(saved_digest)[:16]}...)"
        )
    broken = _first_not_finite(content)
    if broken:
        raise InputError(
            f"cannot use checkpoint {path}: {broken} holds numbers that are not finite; use the checkpoint of an earlier step "
            "(`wmse evaluate`: --checkpoint STEP)"
        )
    model = plain_names(content["model"])
    # Older checkpoints hold BatchNorm's number of batches, which nothing reads.
    content["model"] = {name: value for name, value in model.items() if not name.endswith(".num_batches_tracked")}
    return content


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Read a file and check its structure. Returns the content and its digest."""
    # torch would take any other file for its format of before 2020, and fail in many ways.
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise InputError(f"cannot read checkpoint {path}: it is truncated, damaged or not a checkpoint")
    content = torch.load(path, map_location="cpu", weights_only=True)
    # A file of another program may hold anything, so the structure is checked before it is used.
    entries = content if isinstance(content, dict) else {}
    found = entries.get("format")
    model = entries.get("model")
    if found not in _READABLE or not isinstance(model, dict):
        raise InputError(f"{path} is not a checkpoint of this program (format {FORMAT} expected, found {found})")
    for name, value in model.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise InputError(
                f"cannot use checkpoint {path}: its model holds {name!r}, which is not a tensor with a name"
            )
    step = content.get("step")
    step_in_name = step_of(path)
    if type(step) is not int or step < 0 or step_in_name not in (None, step):
        raise InputError(f"cannot use checkpoint {path}: its content is of step {step!r}")
    return content, content_digest(content)


def load_newest(folder: Path, check: Callable[[dict[str, Any]], None] = lambda content: None) -> dict[str, Any] | None:
    """Load the newest usable checkpoint; None if the folder has no checkpoints. Logs each newer one that it skips.

    check: raises InputError if the content cannot be used. Raises InputError if there are files but none is usable: a fresh
    start would overwrite work that may still be recovered."""
    found = list_checkpoints(folder)
    reasons = []
    # Try the newest one first, then the ones before it.
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
            "Move them away to start from scratch, or use another --run_dir"
        )
    return None


def choose_checkpoint(run_dir: Path, which: str) -> Path:
    """Return the path of a checkpoint. which: "last", a step, or a path.

    Raises InputError if the run has no such checkpoint; a path is returned unchecked."""
    folder = run_dir / "checkpoints"
    found = list_checkpoints(folder)
    if which == "last":
        if not found:
            raise InputError(f"{folder} holds no checkpoint: wait until the run has saved one")
        return found[-1][1]
    # A number is a step, anything else a path.
    if which.isdigit():
        path = checkpoint_path(folder, int(which))
        if not path.exists():
            steps = ", ".join(str(step) for step, _ in found)
            raise InputError(f"{run_dir} has no checkpoint of step {which}; it has steps: {steps}")
        return path
    return Path(which)


def plain_names(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without the prefixes of DDP and torch.compile."""
    return {_strip(name): value for name, value in state.items()}


def _strip(name: str) -> str:
    # The two wrappers may be nested in either order.
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name.replace("._orig_mod.", ".")


def load_encoder(model: nn.Module, path: Path) -> None:
    """Load the encoder of another run's checkpoint into `model` (not wrapped by DDP). The projector does not change."""
    content = load_checkpoint(path)
    put_encoder(model, content["model"], path)


def put_encoder(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Load the encoder of a checkpoint's model state into `model`. path: the checkpoint, for error messages.

    Raises InputError naming the tensors in which the encoders differ."""
    expected = _encoder_tensors(model.state_dict())
    found = _encoder_tensors(state)
    # The same names must exist on both sides, with the same shapes.
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    found_shapes = {name: tensor.shape for name, tensor in found.items()}
    all_names = sorted(shapes | found_shapes)
    different = [name for name in all_names if shapes.get(name) != found_shapes.get(name)]
    if different:
        raise InputError(
            f"the encoder in {path} does not fit this config: {len(different)} tensors differ, the first are "
            f"{', '.join(different[:3])}; use the same model.backbone and model.stem, and for a vision transformer views.size"
        )
    # The names were compared above. A strict load would ask for the projector as well.
    model.load_state_dict(found, strict=False)


def _encoder_tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("encoder.")}
