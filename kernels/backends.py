"""The abilities of the whitening backends, and the fastest one for given sizes, which "auto" uses.

The measured times are in backends_cpu.json and backends_cuda.json next to this file, written by
`python -m trainer.bench.whitening`. A device without a table uses "torch".
"""

import functools
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

# "reference" defines the result, "torch" runs anywhere, "triton" needs an NVIDIA GPU.
BACKENDS = ("reference", "torch", "triton")
# `kernels.whitening.whiten` describes them. All but the first have the backends "reference" and "torch" only.
WHITENINGS = ("cholesky", "zca", "standardise")
LARGEST_TRITON_SIZE = 512  # dimensions; the factor kernel keeps a panel of 16 rows of the matrix in registers


def why_not(backend: str, device_type: str, size: int, in_float64: bool) -> str | None:
    """Return why a backend cannot whiten slices in `size` dimensions, or None if it can.

    The reason is worded to follow the backend's name in a message.
    """
    if backend != "triton":
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


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def backends_for(device: torch.device) -> tuple[str, ...]:
    """Return the backends that run at full speed on a device, which interpreted kernels do not."""
    has_kernels = device.type == "cuda" and not why_not("triton", "cuda", 1, False)
    return tuple(name for name in BACKENDS if name != "triton" or has_kernels)


def fastest_backend(device_type: str, batch: int, num_rows: int, size: int, in_float64: bool) -> str:
    """Return the fastest backend that can whiten `batch` slices of `num_rows` rows in `size` dimensions.

    It is the one with the shortest time at the nearest sizes that were measured. "reference" is never chosen, because its
    backward follows the TF32 and autocast settings at the time of the call.
    """
    cells = _measured(device_type)
    if not cells:
        return "torch"
    wanted = (batch, num_rows, size)
    # Take the row of the table whose sizes are nearest, and the fastest backend in it.
    nearest = min(cells, key=lambda cell: _distance(wanted, (cell["slices"], cell["rows"], cell["size"])))
    times = nearest["microseconds"]
    able = [name for name in times if name != "reference" and why_not(name, device_type, size, in_float64) is None]
    return min(able, key=times.__getitem__)


def _distance(wanted: tuple[int, int, int], cell: tuple[int, int, int]) -> float:
    """Return the distance between two (slices, rows, size) in logarithms: twice as many and half as many are equally far."""
    return sum(abs(math.log(a / b)) for a, b in zip(wanted, cell, strict=True))


@functools.cache
def _measured(device_type: str) -> list[dict[str, Any]]:
    """Read the cells of a device's table of measured times; return an empty list if there is no table."""
    path = Path(__file__).with_name(f"backends_{device_type}.json")
    return json.loads(path.read_text())["cells"] if path.exists() else []
