"""What this machine has: python -m tests.gpu.environment OUT.json [--tiny]

The card, versions, tools, and which of this project's packages are missing: parts of run.sh that need those are skipped.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import torch

from tests.gpu.packages import PACKAGES, is_there, version
from tests.gpu.part import Part, begin, end

TOOLS = ("nvidia-smi", "compute-sanitizer", "nvcc", "ncu", "git", "g++")


def find_tool(name: str) -> str | None:
    """Its path, looked for where CUDA's toolkit is installed, too."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")


def card(device: torch.device) -> dict[str, Any]:
    """Of a GPU: memory, multiprocessors, capability."""
    if device.type != "cuda":
        return {}
    p = torch.cuda.get_device_properties(device)
    return {"gib": p.total_memory / 2**30, "multiprocessors": p.multi_processor_count, "capability": [p.major, p.minor]}


def run(part: Part) -> int:
    """Look, say, write; the exit code of the part."""
    there = {module: version(module) for module in PACKAGES if is_there(module)}
    missing = [module for module in PACKAGES if module not in there]
    tools = {name: find_tool(name) for name in TOOLS}
    for name, found in {**there, **tools}.items():
        print(f"{name:<18} {found or 'not there'}")
    result = {**card(part.device), "packages": there, "missing": missing, "tools": tools}
    return end(part, result, [], f"missing: {', '.join(missing) or 'nothing'}")


if __name__ == "__main__":
    sys.exit(run(begin(__doc__)))
