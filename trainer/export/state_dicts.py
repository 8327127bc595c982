"""Weights of other programs: read a file safely, and find the one encoder in it, whatever surrounds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.run.checkpoint_check import first_not_finite

# Of the two encoders of MoCo, BYOL and DINO, the one that these methods evaluate.
_EVALUATED = ("encoder_q", "online", "teacher")
_DEEPEST = 3  # levels of dicts around the state dict, as in {"state": {"model": {...}}}

State = dict[str, Tensor]


class _Candidate(NamedTuple):
    """Part of a file that may be the encoder."""

    place: str  # keys that lead to it and the prefix of its names
    tensors: State  # without the prefix


def read_weights(path: Path) -> Any:
    """Read a safetensors file, or a file of torch.save that holds plain tensors and values only. Raises InputError."""
    if not path.is_file():
        raise InputError(f"the file {path} with weights does not exist")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise nearly any type
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"cannot read the weights in {path}: {printable(reason)}. A file may hold tensors and plain values only; if you "
            "trust it, load it with torch.load(..., weights_only=False) and save its state dict alone"
        ) from error


def find_encoder(content: Any, expected: State, path: Path) -> State:
    """Return the tensors of `content` that have the names and shapes of `expected`, under one common prefix.

    The prefix and the dicts around the tensors may be any (module., backbone., encoder_q., state_dict, model, ...).
    Raises InputError if no part of the file fits, naming the tensors that differ, or if several parts do."""
    candidates = [candidate for state in _state_dicts(content, ()) for candidate in _candidates(state, expected)]
    if not candidates:
        raise InputError(
            f"{path} holds no tensor of this architecture, which has {_some(sorted(expected))}: give the architecture "
            "whose weights the file holds"
        )
    fitting = [candidate for candidate in candidates if not _differences(candidate.tensors, expected)]
    if not fitting:
        nearest = max(candidates, key=lambda candidate: len(expected.keys() & candidate.tensors.keys()))
        differences = _differences(nearest.tensors, expected)
        raise InputError(
            f"the weights in {path} do not fit the architecture (nearest part: {nearest.place or 'the whole file'}): "
            f"{'; '.join(differences)}"
        )
    if len(fitting) > 1:
        fitting = [candidate for candidate in fitting if any(word in candidate.place for word in _EVALUATED)] or fitting
    if len(fitting) > 1:
        places = ", ".join(candidate.place or "the top level" for candidate in fitting)
        raise InputError(f"{path} holds several encoders that fit ({places}): save the state dict of one of them alone")
    found = {name: fitting[0].tensors[name] for name in expected}
    broken = first_not_finite(found, str(path))
    if broken:
        raise InputError(f"cannot use the weights in {path}: {broken} holds numbers that are not finite")
    return found


def _state_dicts(value: Any, keys: tuple[str, ...]) -> Iterator[_Candidate]:
    """Yield every dict of named tensors in nested dicts."""
    if not isinstance(value, dict):
        return
    tensors = {key: item for key, item in value.items() if isinstance(key, str) and isinstance(item, Tensor)}
    if tensors:
        yield _Candidate(".".join(keys), tensors)
    if len(keys) < _DEEPEST:
        for key, item in value.items():
            yield from _state_dicts(item, (*keys, printable(str(key))))


def _candidates(state: _Candidate, expected: State) -> Iterator[_Candidate]:
    """Yield the part of a state dict under each prefix that leads to at least one expected name."""
    prefixes: Counter[str] = Counter()
    for name in state.tensors:
        parts = name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in expected:
                prefixes["".join(f"{part}." for part in parts[:start])] += 1
    for prefix in prefixes:
        tensors = {}
        for name, tensor in state.tensors.items():
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = tensor
        place = f"{state.place} {printable(prefix)}*" if prefix else state.place
        yield _Candidate(place.strip(), tensors)


def _differences(found: State, expected: State) -> list[str]:
    """Describe missing and unexpected tensors, and those of another shape. Classifiers and projectors do not count."""
    missing = sorted(expected.keys() - found.keys())
    both = sorted(expected.keys() & found.keys())
    shapes = [name for name in both if expected[name].shape != found[name].shape]
    # A deeper network of the same family has all tensors of this one, and more of them in the same modules.
    modules = {name.partition(".")[0] for name in expected}
    others = [name for name in found.keys() - expected.keys() if not name.endswith("num_batches_tracked")]
    unexpected = sorted(name for name in others if name.partition(".")[0] in modules)
    named = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    return [f"{len(names)} tensors {kind}: {_some(names)}" for kind, names in named.items() if names]


def _some(names: list[str]) -> str:
    shown = [printable(name) for name in names[:5]]
    return ", ".join(shown) + (", ..." if len(names) > 5 else "")
