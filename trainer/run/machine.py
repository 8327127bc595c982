"""What a figure was measured with: commit, versions, device. Every benchmark result carries it."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.run.commit import first_line, git_commit


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions(device: torch.device) -> dict[str, str]:
    """Of Python, torch and Triton, where it is installed; on a GPU also of CUDA (that torch was built with) and the driver."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "unknown"
    return found


def provenance(device: torch.device) -> dict[str, Any]:
    """For the head of a result."""
    return {
        "device": device_name(device),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "versions": versions(device),
        "commit": git_commit(),
    }
