"""Full float32 for the linear algebra of this package, whatever the program around it allows."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class full_float32:  # noqa: N801  used as a context manager, like torch's own
    """Run a block without autocast and without TF32 or bfloat16 products; restore both afterwards, also after an error.

    A covariance of M = 2k white rows has a condition number of 34 already, and TF32 products break the factor from
    30..1000 on. Only the `fp32_precision` flags are used: reading a legacy flag (`allow_tf32`) raises once a program
    has set a new one, while `fp32_precision` mirrors what the legacy calls set. What has nothing to change is left
    alone, and this is a class: with a generator, both flags and autocast it cost as much as a product of small slices.
    """

    def __init__(self, device: torch.device) -> None:
        self._flags = _matmul_flags(device.type)
        self._autocast = without_autocast(device)

    def __enter__(self) -> None:
        self._precision = self._flags.fp32_precision
        if self._precision not in ("ieee", "none"):
            self._flags.fp32_precision = "ieee"
        self._autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._autocast.__exit__(*error)
        if self._precision not in ("ieee", "none"):
            # A flag that followed `torch.backends.fp32_precision` still follows it.
            self._flags.fp32_precision = "none"
            if self._flags.fp32_precision != self._precision:
                self._flags.fp32_precision = self._precision


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast on a device; costs nothing where it is off already."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _matmul_flags(device_type: str) -> Any:
    """The settings of the library that multiplies matrices on a device."""
    return torch.backends.cuda.matmul if device_type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
