"""What this machine has: python -m tests.gpu.environment OUT.json. The card, its driver, packages and tools."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata

import torch

from tests.gpu.__main__ import is_there
from tests.gpu.part import Line, Task, main

PACKAGES = {  # module -> distribution
    "torch": "torch",
    "torchvision": "torchvision",
    "triton": "triton",
    "timm": "timm",
    "numpy": "numpy",
    "PIL": "pillow",
    "nvidia.dali": "nvidia-dali-cuda120",
    "nvidia.nvimgcodec": "nvidia-nvimgcodec-cu12",
    "jsonargparse": "jsonargparse",
    "yaml": "pyyaml",
    "rich": "rich",
    "tensorboard": "tensorboard",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}


def version(module: str) -> str | None:
    """Of the distribution that has the module; "unknown" where the module lies there without one."""
    try:
        return metadata.version(PACKAGES[module]) if is_there(module) else None
    except metadata.PackageNotFoundError:
        return "unknown"


def environment(task: Task) -> Iterator[Line]:
    """A line of the card, one of packages, one of tools."""
    if task.device.type == "cuda":
        p = torch.cuda.get_device_properties(task.device)
        figures = {"gib": p.total_memory / 2**30, "multiprocessors": p.multi_processor_count}
        yield {"name": "card", "said": f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}", **figures}
    packages = {module: version(module) for module in PACKAGES}
    absent = [module for module, found in packages.items() if found is None]
    yield {"name": "missing", "said": ", ".join(absent) or "nothing", "packages": packages}
    tools = {name: shutil.which(name) for name in ("nvidia-smi", "nvcc", "ncu", "compute-sanitizer", "g++")}
    yield {"name": "tools", "paths": tools, "cores": len(os.sched_getaffinity(0))}


if __name__ == "__main__":
    main(environment, __doc__)
