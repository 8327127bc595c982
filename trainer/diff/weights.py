"""Tensors in which two checkpoints of the same step differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.run.checkpoint import load_checkpoint, map_tensors

_PARTS = ("model", "optimizer", "loss_scale", "online_probe")


class TensorDifference(NamedTuple):
    """Difference of two tensors of one name."""

    name: str
    largest: float | None = None
    """Largest absolute difference; None: the tensors have no elements to compare."""
    relative: float | None = None
    """Largest relative difference."""
    first_index: tuple[int, ...] | None = None
    """Index of the first element that differs."""
    note: str = ""

    def describe(self) -> str:
        """Say in words how they differ."""
        if self.note:
            return f"{self.name}: {self.note}"
        return (
            f"{self.name}: largest difference {self.largest:.3g}, relative {self.relative:.3g}, first at "
            f"{list(self.first_index or ())}"
        )


class WeightsResult(NamedTuple):
    """Comparison of all checkpoints that two runs have in common."""

    common: list[int]
    same: list[int]
    """Steps whose checkpoints are bit-identical."""
    different: int | None
    """The first step whose checkpoints differ."""
    tensors: list[TensorDifference]
    """Differences of that step, or why one of its files cannot be read."""

    @property
    def identical(self) -> int | None:
        """The last step whose checkpoints are bit-identical."""
        return self.same[-1] if self.same else None


def compare_checkpoints(a: dict[int, Path], b: dict[int, Path]) -> WeightsResult:
    """Compare the checkpoints of two runs. a, b: by step."""
    # Checkpoints of other steps cannot be compared.
    common = sorted(a.keys() & b.keys())
    same = []
    different = None
    tensors: list[TensorDifference] = []
    for step in common:
        try:
            found = compare_tensors(load_checkpoint(a[step]), load_checkpoint(b[step]))
        except InputError as error:
            # A running run may have deleted its oldest checkpoint in the meantime.
            if not (a[step].exists() and b[step].exists()):
                continue
            found = [TensorDifference("the file", note=str(error))]
        if not found:
            same.append(step)
        # Later checkpoints differ as well, which says nothing new.
        elif different is None:
            different = step
            tensors = found
    return WeightsResult(common, same, different, tensors)


def compare_tensors(a: dict[str, Any], b: dict[str, Any]) -> list[TensorDifference]:
    """Return the differences of the weights, moments and other state in two checkpoints."""
    ours = _tensors(a)
    theirs = _tensors(b)
    found = []
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours:
            found.append(TensorDifference(name, note="only in B"))
        elif name not in theirs:
            found.append(TensorDifference(name, note="only in A"))
        else:
            difference = _compare(name, ours[name], theirs[name])
            if difference is not None:
                found.append(difference)
    return found


def _tensors(content: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by dotted name."""
    found: dict[str, Tensor] = {}

    def note(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        # The sums of the online probe are those since the last logged line, and no state.
        if path[-1] != "sums":
            found[".".join(map(str, path))] = tensor
        return tensor

    map_tensors({part: content.get(part) for part in _PARTS}, note)
    return found


def _compare(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        note = f"{tuple(a.shape)} of {a.dtype} in A, {tuple(b.shape)} of {b.dtype} in B"
        return TensorDifference(name, note=note)
    # NaN is unequal to itself, but its bytes are not.
    if torch.equal(_bytes(a), _bytes(b)):
        return None
    # Zeros of different signs have different bits, but are equal numbers, so the first difference is one of bits.
    differs = (_bytes(a) != _bytes(b)).view(*a.shape, -1).any(-1)
    first = tuple(differs.nonzero()[0].tolist())
    ours = a.double()
    theirs = b.double()
    distance = (ours - theirs).abs()
    # The smallest positive number keeps two zeros from being divided by zero.
    scale = torch.maximum(ours.abs(), theirs.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    relative = distance / scale
    return TensorDifference(name, distance.max().item(), relative.max().item(), first)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, one after the other."""
    return tensor.contiguous().view(-1).view(torch.uint8)
