"""The abilities of the whitening backends."""

import functools
import importlib.util
import os

import torch

# "reference" defines the result, "torch" runs anywhere, "triton" needs an NVIDIA GPU. "triton_4_warps" gives each factor 4
# warps instead of 8; `wmse tune` measures which is faster.
BACKENDS = ("reference", "torch", "triton", "triton_4_warps")
# `kernels.whitening.whiten` describes them. All but the first have the backends "reference" and "torch" only.
WHITENINGS = ("cholesky", "zca", "standardise")
LARGEST_TRITON_SIZE = 512  # dimensions; the factor kernel keeps a panel of 16 rows of the matrix in registers


def why_not(backend: str, device_type: str, size: int, in_float64: bool) -> str | None:
    """Return why a backend cannot whiten slices in `size` dimensions, or None if it can.

    The reason is worded to follow the backend's name in a message.
    """
    if not backend.startswith("triton"):
        return None
    if not _has_triton():
        return "needs the package triton, which is not installed"
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs an NVIDIA GPU (this is {device_type!r}), or TRITON_INTERPRET=1 in the environment for tests"
    if in_float64:
        return "whitens in float32 only"
    if size > LARGEST_TRITON_SIZE:
        return f"whitens in at most {LARGEST_TRITON_SIZE} dimensions, not {size}"
    return None


def why_no_kernels(device_type: str) -> str | None:
    """Return why Triton kernels cannot run on a kind of device, or None if they can. It is worded as in `why_not`."""
    return why_not("triton", device_type, size=1, in_float64=False)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def backends_for(device: torch.device) -> tuple[str, ...]:
    """Return the backends that run at full speed on a device, which interpreted kernels do not."""
    has_kernels = device.type == "cuda" and not why_no_kernels("cuda")
    return tuple(name for name in BACKENDS if has_kernels or not name.startswith("triton"))
