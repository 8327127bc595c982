"""Provenance of a measurement: commit, versions and device. Every benchmark result records it."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.run.commit import first_line, git_commit

_PACKAGES = {
    "triton": "triton",
    "dali": "nvidia-dali-cuda120",
    "timm": "timm",
    "torchvision": "torchvision",
    "numpy": "numpy",
}


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # not every architecture lists a model name


def tuned_for(device: torch.device) -> str:
    """Return the device and the versions on which the speed of settings depends, see `Config.tuned_for`."""
    found = versions(device)
    return ", ".join([device_name(device), *(f"{name} {found[name]}" for name in ("torch", "triton") if name in found)])


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of Python, torch and packages that may change a result, on a GPU also of CUDA and the driver."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name, package in _PACKAGES.items():
        # Builds of torch for the CPU come without Triton, and other machines without DALI.
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        driver = first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        found["driver"] = driver or "unknown"
    return found


def provenance(device: torch.device) -> dict[str, Any]:
    """Return device, number of cores, versions and commit, as a benchmark result records them."""
    return {
        "device": device_name(device),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "versions": versions(device),
        "commit": git_commit(),
    }


def describe_program(program_version: str) -> str:
    """Describe the program, its packages, this machine and the kernels in some lines, for `wmse --version`."""
    from kernels.backends import backends_for  # the evaluator imports this module and needs no kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packages = ", ".join(f"{name} {version}" for name, version in versions(device).items())
    kernels = ", ".join(backends_for(device))
    return (
        f"wmse {program_version}, commit {git_commit() or 'unknown'}\n"
        f"packages: {packages}\n"
        f"device: {device_name(device)}\n"
        f"whitening kernels: {kernels}"
    )
