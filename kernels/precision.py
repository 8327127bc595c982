"""Keep the linear algebra of this package in full float32, whatever the surrounding program allows."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class full_float32:  # noqa: N801  a context manager, named like torch's own
    """Runs a block without autocast and without TF32 or bfloat16 products, and restores both, even after an error.

    Even the covariance of M = 2k white rows has a condition number of 34, and TF32 products break the factor at condition
    numbers of 30 to 1000. Only the `fp32_precision` flags are used: reading a legacy flag (`allow_tf32`) raises an error once a
    program has set a new flag, while `fp32_precision` reflects what the legacy calls set.

    Flags and autocast are touched only if they have to change, and this is a class instead of a generator. Otherwise entering
    it would cost as much as a product of small slices.
    """

    def __init__(self, device: torch.device) -> None:
        self._flags = _matmul_flags(device.type)
        self._autocast = without_autocast(device)

    def __enter__(self) -> None:
        # "ieee" and "none" already mean full float32.
        self._precision = self._flags.fp32_precision
        if self._precision not in ("ieee", "none"):
            self._flags.fp32_precision = "ieee"
        self._autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._autocast.__exit__(*error)
        if self._precision not in ("ieee", "none"):
            # "none" lets the flag follow `torch.backends.fp32_precision` again; set it only if it was set on its own.
            self._flags.fp32_precision = "none"
            if self._flags.fp32_precision != self._precision:
                self._flags.fp32_precision = self._precision


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on a device; it costs nothing if autocast is off already."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _matmul_flags(device_type: str) -> Any:
    """Return the settings of the library that multiplies matrices on a device."""
    return torch.backends.cuda.matmul if device_type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
