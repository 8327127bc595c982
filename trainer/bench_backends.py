"""Which backends of the whitening can be timed, and in words why the others cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels import whitening

BASES = ("loop", "reference")  # every ratio is to these two: a benchmark without them has failed


def runnable_backends(device: torch.device) -> tuple[tuple[str, ...], dict[str, str]]:
    """-> names that run at full speed on the device, and {name: reason} of the others."""
    backends_for = getattr(whitening, "backends_for", lambda device: tuple(whitening.BACKENDS))
    runnable = backends_for(device)
    names = dict.fromkeys((*whitening.BACKENDS, "triton"))
    return runnable, {name: _reason(name, device) for name in names if name not in runnable}


def _reason(name: str, device: torch.device) -> str:
    if name not in whitening.BACKENDS:
        return "this installation does not have it"
    return f"does not run at full speed on a device of type {device.type}"


def drop_refusing(steps: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Call each once, and take out of `steps` those that refuse the size or find no memory for it -> {name: reason}."""
    refused = {}
    for name, step in list(steps.items()):
        try:
            step()
        except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
            if name in BASES:
                raise
            refused[name] = f"{type(error).__name__}: {error}"
            del steps[name]
    return refused
