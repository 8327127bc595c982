"""Which backend of the whitening can do what, and which is the fastest: "auto" asks here.

The measured tables are backends_cpu.json and backends_cuda.json beside this file, written by
`python -m trainer.bench.whitening`. A device without a table takes "torch".
"""

import functools
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

BACKENDS = ("reference", "torch", "triton")
LARGEST_TRITON_SIZE = 512  # a panel of the factor keeps 16 rows of the matrix in registers


def why_not(backend: str, device_type: str, size: int, in_float64: bool) -> str | None:
    """What keeps a backend from whitening slices in `size` dimensions -> a reason that follows its name, or None."""
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
    """The backends that run at full speed on a device (an interpreted kernel does not)."""
    return tuple(
        name for name in BACKENDS if name != "triton" or (device.type == "cuda" and not why_not(name, "cuda", 1, False))
    )


def fastest_backend(device_type: str, batch: int, num_rows: int, size: int, in_float64: bool) -> str:
    """The backend with the least time at the measured sizes nearest to these (in the logarithms), among those that can.

    Never "reference", whose backward follows the TF32 and autocast settings of the moment.
    """
    cells = _measured(device_type)
    if not cells:
        return "torch"
    wanted = (batch, num_rows, size)
    nearest = min(cells, key=lambda cell: _distance(wanted, (cell["slices"], cell["rows"], cell["size"])))
    able = {
        name: time
        for name, time in nearest["microseconds"].items()
        if name != "reference" and why_not(name, device_type, size, in_float64) is None
    }
    return min(able, key=able.__getitem__)


def _distance(wanted: tuple[int, int, int], cell: tuple[int, int, int]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(wanted, cell, strict=True))


@functools.cache
def _measured(device_type: str) -> list[dict[str, Any]]:
    path = Path(__file__).with_name(f"backends_{device_type}.json")
    return json.loads(path.read_text())["cells"] if path.exists() else []
