"""Compile every Triton kernel for a GPU that need not be there: `compile_kernels.py CAPABILITY SIZE...`, JSON on stdout.

For each kernel, as `kernels.whitening_triton` would launch it, and with the size 0 as `kernels.lars_triton` would:
registers a thread, bytes spilled, bytes of shared memory of a program, widest load, and whether any product is rounded to
TF32 or bfloat16. Run in a process of its own, without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import lars_triton, whitening_triton


def compile_all(capability: int, size: int) -> list[dict[str, Any]]:
    """Both passes with every kernel's launch replaced by its compilation."""
    built: list[dict[str, Any]] = []

    def launch(kernel: Any, grid: Any) -> Any:
        def build(*arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
            values = [*arguments, *constants.values()]
            types = {
                name: "constexpr" if name in constants else _type(value)
                for name, value in zip(kernel.arg_names, values, strict=True)
            }
            source = ASTSource(kernel, types, constexprs=constants)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            built.append({"kernel": kernel.fn.__name__, "size": size, **constants, **_resources(compiled, capability)})

        return build

    with mock.patch.object(triton.runtime.jit.JITFunction, "__getitem__", launch):
        if size == 0:
            lars_updates()
            return built
        for eps in (0.0, 0.1):
            x = torch.empty(1, 2 * size, size)
            z, w, u, ok, _ = whitening_triton.forward(x, eps, False)
            whitening_triton.backward(x, z, w, u, ok, eps)
    return built


def lars_updates() -> None:
    """Both groups' kernels, for tensors that 16 bytes divide and for others."""
    for numel in (8, 7):
        tensors = [[torch.empty(numel)] for _ in range(3)]
        for trust in (1e-3, None):
            settings = {"rate": 0.1, "momentum": 0.9, "weight_decay": 0.0, "trust_coefficient": trust}
            lars_triton.GroupUpdate()(*tensors, torch.zeros(()), **settings)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return {torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _resources(compiled: Any, capability: int) -> dict[str, Any]:
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        architecture = f"-arch=sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(ptxas), "-v", architecture, ptx.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None, said
    assert spilled is not None, said
    return {
        "registers": int(registers[1]),
        "spilled": int(spilled[1]),
        "shared": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global[.\w]*\.v4\.", compiled.asm["ptx"])),
        "rounds_products": "tf32" in compiled.asm["ptx"] or "bf16" in compiled.asm["ptx"],
    }


if __name__ == "__main__":
    print(json.dumps([one for size in sys.argv[2:] for one in compile_all(int(sys.argv[1]), int(size))]))
