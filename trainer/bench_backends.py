"""Which backends of the whitening can be timed, and in words why the others cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.backends import BACKENDS, backends_for, why_not

BASES = ("loop", "reference")  # every ratio is to these two: a benchmark without them has failed


def runnable_backends(device: torch.device) -> tuple[tuple[str, ...], dict[str, str]]:
    """-> names that run at full speed on the device, and {name: reason} of the others."""
    runnable = backends_for(device)
    reasons = {
        name: why_not(name, device.type, size=1, in_float64=False) or f"does not run at full speed on {device.type}"
        for name in BACKENDS
        if name not in runnable
    }
    return runnable, reasons


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
