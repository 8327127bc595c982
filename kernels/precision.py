"""Full float32 for the linear algebra of this package, whatever the program around it allows."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Run a block without autocast and without TF32 or bfloat16 products; restore both afterwards, also after an error.

    A covariance of M = 2k white rows has a condition number of 34 already, and TF32 products break the factor from
    30..1000 on. Only the `fp32_precision` flags are used: reading a legacy flag (`allow_tf32`) raises once a program
    has set a new one, while `fp32_precision` mirrors what the legacy calls set. What has nothing to change is left
    alone: entering autocast and reading the other device's flag would cost as much as a small operation.
    """
    flags = _matmul_flags(device.type)
    precision = flags.fp32_precision
    rounds = precision not in ("ieee", "none")
    autocast = torch.is_autocast_enabled(device.type)
    try:
        if rounds:
            flags.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False) if autocast else nullcontext():
            yield
    finally:
        if rounds:
            # A flag that followed `torch.backends.fp32_precision` goes on following it.
            flags.fp32_precision = "none"
            if flags.fp32_precision != precision:
                flags.fp32_precision = precision


def _matmul_flags(device_type: str) -> Any:
    """The settings of the library that multiplies matrices on a device."""
    return torch.backends.cuda.matmul if device_type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
