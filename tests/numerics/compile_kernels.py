"""Compiles every Triton kernel for a GPU that this machine may lack: `compile_kernels.py CAPABILITY SIZE...`.

Each kernel is compiled as `kernels.whitening_triton` launches it, and for size 0 as `kernels.lars_triton` does. A SIZE such as
views224 compiles those of `kernels.augment_triton` for views of 224 pixels. The result is JSON on stdout: registers per thread,
bytes spilled, bytes of shared memory per program, number of loads of four elements, and whether the code has TF32 or bfloat16.
Run it in a new process, without TRITON_INTERPRET.
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

from kernels import augment_triton, lars_triton, whitening_triton
from kernels.augment_reference import LEVEL, SIGMA, TAPS, no_augmentation

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_all(capability: int, size: str) -> list[dict[str, Any]]:
    """Run forward and backward with each kernel launch replaced by a compilation. Return the resources of each kernel."""
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
        if size.startswith("views"):
            augmented_views(int(size.removeprefix("views")))
            return built
        if size == "0":
            lars_updates()
            return built
        for eps in (0.0, 0.1):
            x = torch.empty(1, 2 * int(size), int(size))
            z, w, u, ok, _ = whitening_triton.forward(x, eps, False)
            whitening_triton.backward(x, z, w, u, ok, eps)
    return built


def lars_updates() -> None:
    """Launch the kernels of LARS, LARC and SGD, for tensors with and without 16-byte alignment."""
    for numel in (8, 7):
        tensors = [[torch.empty(numel)] for _ in range(3)]
        for trust, larc in ((1e-3, False), (1e-3, True), (None, False)):
            rule = lars_triton.Rule(0.9, 0.0, trust, larc)
            group = lars_triton.GroupUpdate()
            group.measure(*tensors, torch.ones(()), rule)
            group.update(torch.ones(()), torch.zeros(()), 0.1, 1.0, rule)


def augmented_views(size: int) -> None:
    """Launch the kernels for views with and without blur and colours, in each data type."""
    choices = no_augmentation(2)
    choices[1, [SIGMA, TAPS, LEVEL]] = 2.0, 13.0, 128.0
    views = [torch.empty(2, size, size, 3, dtype=torch.uint8)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.empty(2, size, size, 3, dtype=dtype)
        for color in (True, False):
            augment_triton.augment(views, choices, torch.empty(2, 3), out, color=color)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _resources(compiled: Any, capability: int) -> dict[str, Any]:
    """Return the resources of a compiled kernel, as ptxas reports them."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        architecture = f"-arch=sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(ptxas), "-v", architecture, ptx.name, "-o", "/dev/null"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None, report
    assert spilled is not None, report
    return {
        "registers": int(registers[1]),
        "spilled": int(spilled[1]),
        "shared": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global[.\w]*\.v4\.", compiled.asm["ptx"])),
        "rounds_products": "tf32" in compiled.asm["ptx"] or "bf16" in compiled.asm["ptx"],
    }


if __name__ == "__main__":
    print(json.dumps([one for size in sys.argv[2:] for one in compile_all(int(sys.argv[1]), size)]))
