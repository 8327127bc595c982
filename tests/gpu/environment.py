"""List the card, packages and tools of this machine: python -m tests.gpu.environment OUT.json"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata

import torch

from tests.gpu.part import Line, Task, main

PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "timm",
    "numpy",
    "pillow",
    "nvidia-dali-cuda120",
    "nvidia-nvimgcodec-cu12",
    "jsonargparse",
    "pyyaml",
    "rich",
    "tensorboard",
    "pytest",
    "hypothesis",
)
TOOLS = ("nvidia-smi", "nvcc", "ncu", "compute-sanitizer", "g++")


def environment(task: Task) -> Iterator[Line]:
    """Yield a line for the card, one for the packages, and one for the tools."""
    if task.device.type == "cuda":
        p = torch.cuda.get_device_properties(task.device)
        gib = p.total_memory / 2**30
        said = f"{p.name}, {gib:.0f} GiB, sm_{p.major}{p.minor}"
        yield {"name": "card", "said": said, "gib": gib, "multiprocessors": p.multi_processor_count}
    # Names of distributions differ in case.
    installed = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
    packages = {name: installed.get(name) for name in PACKAGES}
    missing = [name for name, version in packages.items() if version is None]
    yield {"name": "missing", "said": ", ".join(missing) or "nothing", "packages": packages}
    tools = {name: shutil.which(name) for name in TOOLS}
    yield {"name": "tools", "paths": tools, "cores": len(os.sched_getaffinity(0))}


if __name__ == "__main__":
    main(environment, __doc__)
