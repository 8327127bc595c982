"""Weights of other programs: read a file safely, and find the one encoder in it, whatever surrounds it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class _Candidate(NamedTuple):
    """Part of a file that may be the encoder."""

    place: str
    """Keys that lead to it and the prefix of its names, for messages; empty for the top level."""
    tensors: State
    """Tensors by their names without the prefix."""


def read_weights(path: Path) -> Any:
    """Read a safetensors file, or a file of torch.save that holds plain tensors and values only. Raises InputError."""
    if not path.is_file():
        raise InputError(f"cannot read the weights in {path}: there is no such file")
    try:
        # A safetensors file, whatever its name, begins with the length of a JSON header in 8 bytes.
        with path.open("rb") as file:
            beginning = file.read(9)
        if beginning[8:] == b"{":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
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
    message = str(error).strip()
    # Some errors have no message.
    if not message:
        message = type(error).__name__
    line = message.splitlines()[0]
    return printable(line.rstrip("."))


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
    fitting = [candidate for candidate in candidates if not _differences(candidate.tensors, expected)]
    if not fitting:
        # The part with the most tensors of the right name shows best what is wrong.
        nearest = max(candidates, key=lambda candidate: len(expected.keys() & candidate.tensors.keys()))
        differences = "; ".join(_differences(nearest.tensors, expected))
        raise InputError(
            f"the weights in {path} do not fit the architecture (nearest part: {nearest.place or 'the whole file'}): "
            f"{differences}"
        )
    if len(fitting) > 1:
        # A momentum encoder or a student fits as well as the encoder that the method evaluates.
        evaluated = [candidate for candidate in fitting if _is_evaluated(candidate)]
        fitting = evaluated or fitting
    if len(fitting) > 1:
        places = ", ".join(candidate.place or "the top level" for candidate in fitting)
        raise InputError(f"{path} holds several encoders that fit ({places}): save the state dict of one of them alone")
    tensors = fitting[0].tensors
    found = {name: tensors[name].float() for name in expected}
    broken = first_not_finite(found, str(path))
    if broken:
        raise InputError(f"cannot use the weights in {path}: {broken} holds numbers that are not finite")
    return found


def _candidates(value: Any, expected: State, keys: tuple[str, ...]) -> Iterator[_Candidate]:
    """Yield the tensors under each prefix that leads to at least one expected name, in every nested dict."""
    if not isinstance(value, dict):
        return
    state: State = {}
    for key, item in value.items():
        if isinstance(key, str) and isinstance(item, Tensor):
            state[key] = item
    for prefix in _prefixes(state, expected):
        tensors: State = {}
        for name, tensor in state.items():
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = tensor
        place = ".".join(keys)
        if prefix:
            place = f"{place} {printable(prefix)}*"
        yield _Candidate(place.strip(), tensors)
    # The state dict may be one of several values around it, such as the epoch and the optimizer.
    if len(keys) < _DEEPEST:
        for key, item in value.items():
            inner_keys = (*keys, printable(str(key)))
            yield from _candidates(item, expected, inner_keys)


def _prefixes(state: State, expected: State) -> list[str]:
    """Return the prefixes, such as "module.encoder_q.", behind which a name in `state` is an expected one."""
    prefixes: dict[str, None] = {}  # a set that keeps the order
    for name in state:
        parts = name.split(".")
        # Cut the name at each of its dots.
        for start in range(len(parts)):
            rest = ".".join(parts[start:])
            if rest in expected:
                prefixes[name.removesuffix(rest)] = None
    return list(prefixes)


def _is_evaluated(candidate: _Candidate) -> bool:
    """Return whether this is the encoder that its method evaluates, by the names around it."""
    return any(word in candidate.place for word in _EVALUATED)


def _differences(found: State, expected: State) -> list[str]:
    """Describe missing and unexpected tensors, and those of another shape or kind. Classifiers and projectors do not count."""
    named: dict[str, list[str]] = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": _unexpected(found, expected),
        "of another shape": [],
        "not of plain floating-point numbers": [],
    }
    # Tensors of both sides must have the same shape and a plain dtype.
    for name in sorted(expected.keys() & found.keys()):
        if found[name].shape != expected[name].shape:
            named["of another shape"].append(name)
        if not _is_plain(found[name]):
            named["not of plain floating-point numbers"].append(name)
    lines = []
    for kind, names in named.items():
        if names:
            lines.append(f"{len(names)} tensors {kind}: {some_names(names)}")
    return lines


def _unexpected(found: State, expected: State) -> list[str]:
    """Return the names that belong to another encoder, in order."""
    # A deeper network of the same family has all tensors of this one, and more of them in the same modules.
    modules = {name.partition(".")[0] for name in expected}
    names = []
    for name in sorted(found.keys() - expected.keys()):
        is_counter = name.endswith("num_batches_tracked")
        is_in_module = name.partition(".")[0] in modules
        if is_in_module and not is_counter:
            names.append(name)
    return names


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor holds floating-point numbers: not quantised integers, which need their scale, nor sparse."""
    is_dense = tensor.layout is torch.strided
    is_on_cpu = tensor.device.type == "cpu"
    return tensor.is_floating_point() and is_dense and is_on_cpu
