"""Weights of other programs: read a file safely, and find the one encoder in it, whatever surrounds it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.data.index_build import some_names
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.run.checkpoint_check import first_not_finite

# Of the two encoders of MoCo, BYOL and DINO, the one that these methods evaluate.
_EVALUATED = ("encoder_q", "online", "teacher")
_DEEPEST = 3  # levels of dicts around the state dict, as in {"state": {"model": {...}}}

State = dict[str, Tensor]
_Candidate = tuple[str, State]  # keys that lead to it and the prefix of its names; tensors without the prefix


def read_weights(path: Path) -> Any:
    """Read a safetensors file, or a file of torch.save that holds plain tensors and values only. Raises InputError."""
    if not path.is_file():
        raise InputError(f"cannot read the weights in {path}: there is no such file")
    try:
        # A safetensors file, whatever its name, begins with the length of a JSON header.
        with path.open("rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"
        return load_file(path) if is_safetensors else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise nearly any type
        reason = first_line(error)
        # The advice of torch would run programs that the file holds.
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is not a file of torch.save, or holds other objects"
        raise InputError(
            f"cannot read the weights in {path}: {reason}. A file may hold tensors and plain values only; if you "
            "trust it, load it with torch.load(..., weights_only=False) and save its state dict alone"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error of another library."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0].rstrip("."))


def find_encoder(content: Any, expected: State, path: Path) -> State:
    """Return the tensors of `content` that have the names and shapes of `expected`, under one common prefix.

    The prefix and the dicts around the tensors may be any (module., backbone., encoder_q., state_dict, model, ...).
    Raises InputError if no part of the file fits, naming the tensors that differ, or if several parts do."""
    candidates = list(_candidates(content, expected, ()))
    if not candidates:
        raise InputError(
            f"{path} holds no tensor of this architecture, which has {some_names(sorted(expected))}: give the architecture "
            "whose weights the file holds"
        )
    fitting = [(place, tensors) for place, tensors in candidates if not _differences(tensors, expected)]
    if not fitting:
        place, nearest = max(candidates, key=lambda candidate: len(expected.keys() & candidate[1].keys()))
        raise InputError(
            f"the weights in {path} do not fit the architecture (nearest part: {place or 'the whole file'}): "
            f"{'; '.join(_differences(nearest, expected))}"
        )
    if len(fitting) > 1:
        fitting = [candidate for candidate in fitting if any(word in candidate[0] for word in _EVALUATED)] or fitting
    if len(fitting) > 1:
        places = ", ".join(place or "the top level" for place, _ in fitting)
        raise InputError(f"{path} holds several encoders that fit ({places}): save the state dict of one of them alone")
    _, tensors = fitting[0]
    found = {name: tensors[name].float() for name in expected}
    broken = first_not_finite(found, str(path))
    if broken:
        raise InputError(f"cannot use the weights in {path}: {broken} holds numbers that are not finite")
    return found


def _candidates(value: Any, expected: State, keys: tuple[str, ...]) -> Iterator[_Candidate]:
    """Yield the tensors under each prefix that leads to at least one expected name, in every nested dict."""
    if not isinstance(value, dict):
        return
    state = {key: item for key, item in value.items() if isinstance(key, str) and isinstance(item, Tensor)}
    prefixes: dict[str, None] = {}  # a set that keeps the order
    for name in state:
        parts = name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in expected:
                prefixes["".join(f"{part}." for part in parts[:start])] = None
    for prefix in prefixes:
        tensors = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        inner = (f"{printable(prefix)}*",) if prefix else ()
        yield " ".join([".".join(keys), *inner]).strip(), tensors
    if len(keys) < _DEEPEST:
        for key, item in value.items():
            yield from _candidates(item, expected, (*keys, printable(str(key))))


def _differences(found: State, expected: State) -> list[str]:
    """Describe missing and unexpected tensors, and those of another shape or kind. Classifiers and projectors do not count."""
    both = sorted(expected.keys() & found.keys())
    # A deeper network of the same family has all tensors of this one, and more of them in the same modules.
    modules = {name.partition(".")[0] for name in expected}
    others = sorted(name for name in found.keys() - expected.keys() if not name.endswith("num_batches_tracked"))
    named = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": [name for name in others if name.partition(".")[0] in modules],
        "of another shape": [name for name in both if expected[name].shape != found[name].shape],
        "not of plain floating-point numbers": [name for name in both if not _is_plain(found[name])],
    }
    return [f"{len(names)} tensors {kind}: {some_names(names)}" for kind, names in named.items() if names]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor holds floating-point numbers: not quantised integers, which need their scale, nor sparse."""
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.device.type == "cpu"
