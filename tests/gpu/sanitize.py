"""A small whitening under compute-sanitizer: python -m tests.gpu.sanitize [--tiny]

memcheck finds reads and writes outside of what was allocated (each tensor has an allocation of its own here), racecheck
threads that use shared memory without a barrier between them. Ends as skipped where there is no GPU or no such tool.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from kernels.whitening import whiten
from tests.gpu.environment import find_tool
from tests.gpu.part import skip
from tests.numerics.whitening_cases import random_like, rows_of_condition

SIZES = ((2, 33, 17), (1, 70, 33), (1, 200, 100))  # cut tiles everywhere, one panel of the factor and several
TINY_SIZES = ((2, 9, 4),)
FOUND = 9  # exit code of compute-sanitizer where it found something


def small_whitening(device: torch.device, sizes: tuple[tuple[int, int, int], ...]) -> None:
    """Both passes of the Triton backend, with and without shrinkage, a bad slice among the good ones."""
    for size in sizes:
        for eps in (0.0, 0.1):
            x = rows_of_condition(*size, 1e2).float()
            if len(x) > 1:
                x[-1, 0, 0] = float("nan")
            x = x.to(device).requires_grad_()
            z = whiten(x, eps=eps, backend="triton")
            torch.autograd.grad(z, x, random_like(z))
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(words: list[str]) -> int:
    """Start this program again under each tool; with --inside, be what it watches."""
    if words == ["--inside"]:
        small_whitening(torch.device("cuda"), SIZES)
        return 0
    if words == ["--tiny"]:
        small_whitening(torch.device("cpu"), TINY_SIZES)
        skip("compute-sanitizer needs a GPU; the whitening that it watches ran")
    if not torch.cuda.is_available():
        skip("needs a GPU; --tiny rehearses on a CPU")
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        skip("compute-sanitizer is not on this machine")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    codes = {}
    for tool in ("memcheck", "racecheck"):
        print(f"== {tool}", flush=True)
        command = [
            sanitizer,
            "--tool",
            tool,
            "--error-exitcode",
            str(FOUND),
            sys.executable,
            "-m",
            "tests.gpu.sanitize",
        ]
        codes[tool] = subprocess.run([*command, "--inside"], env=environment, check=False).returncode
    found = {0: "nothing found", FOUND: "found something"}
    print("; ".join(f"{tool}: {found.get(code, f'exit code {code}')}" for tool, code in codes.items()))
    return 1 if any(codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
