"""Full float32 for the linear algebra of this package, whatever the program around it allows."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The two libraries that may round float32 products to TF32 or bfloat16 when a user allows it.
_MATMUL_FLAGS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Run a block without autocast and without TF32 or bfloat16 products; restore both afterwards, also after an error.

    A covariance of M = 2k white rows has a condition number of 34 already, and TF32 products break the factor from
    30..1000 on. Only the `fp32_precision` flags are used: reading a legacy flag (`allow_tf32`) raises once a program
    has set a new one, while `fp32_precision` mirrors what the legacy calls set.
    """
    saved = [flags.fp32_precision for flags in _MATMUL_FLAGS]
    try:
        for flags, precision in zip(_MATMUL_FLAGS, saved, strict=True):
            if precision not in ("ieee", "none"):
                flags.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for flags, precision in zip(_MATMUL_FLAGS, saved, strict=True):
            if precision not in ("ieee", "none"):
                # A flag that followed `torch.backends.fp32_precision` goes on following it.
                flags.fp32_precision = "none"
                if flags.fp32_precision != precision:
                    flags.fp32_precision = precision
