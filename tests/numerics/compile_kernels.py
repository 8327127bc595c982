"""Compiles every Triton kernel for a GPU that this machine may lack: `compile_kernels.py CAPABILITY WHAT...`.

Each kernel is compiled as its module launches it: WHAT is lars, batch_norm, conv1x1, views:224 for views of 224 pixels, or
whitening:64 for embeddings of size 64. The result is JSON on stdout: registers per thread, bytes spilled, bytes of shared
memory per program, number of loads of 16 bytes, and whether the code has tensor-core instructions, TF32 or bfloat16. Run it
in a new process, without TRITON_INTERPRET.
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

from kernels import augment_triton, batch_norm_triton, conv1x1_triton, lars_triton, whitening_triton
from kernels.augment_reference import LEVEL, SIGMA, TAPS, no_augmentation

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_all(capability: int, what: str) -> list[dict[str, Any]]:
    """Run forward and backward with each kernel launch replaced by a compilation. Return the resources of each kernel."""
    built: list[dict[str, Any]] = []

    def launch(kernel: Any, grid: Any) -> Any:
        def build(*arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
            values = [*arguments, *constants.values()]
            named = dict(zip(kernel.arg_names, values, strict=True))
            fixed = constants | {name: None for name, value in named.items() if value is None}
            types = {name: "constexpr" if name in fixed else _type(value) for name, value in named.items()}
            source = ASTSource(kernel, types, constexprs=fixed, attrs=_attributes(named, fixed))
            options = {"num_warps": num_warps, "num_stages": num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            found = {"kernel": kernel.fn.__name__, "what": what, "type": types[kernel.arg_names[0]].lstrip("*")}
            built.append({**found, **constants, **_resources(compiled, capability)})

        return build

    with mock.patch.object(triton.runtime.jit.JITFunction, "__getitem__", launch):
        name, _, size = what.partition(":")
        LAUNCHES[name](int(size or 0))
    return built


def whitening(size: int) -> None:
    """Launch the kernels of forward and backward, with and without shrinkage."""
    for eps in (0.0, 0.1):
        x = torch.empty(1, 2 * size, size)
        z, w, u, ok, _ = whitening_triton.forward(x, eps, False)
        whitening_triton.backward(x, z, w, u, ok, eps)


def lars_updates(_: int) -> None:
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


def batch_norms(_: int) -> None:
    """Launch the kernels for several numbers of channels, with and without parameters, residual and ReLU."""
    for channels, dtype in ((64, torch.bfloat16), (2048, torch.bfloat16), (3, torch.bfloat16), (64, torch.float32)):
        x = torch.empty(4096, channels, dtype=dtype)
        mean, var = batch_norm_triton.moments(x, 2)
        parameter = torch.empty(channels)
        for weight, residual, relu in ((parameter, None, True), (parameter, x, True), (None, None, False)):
            y = batch_norm_triton.normalise(x, mean, var, weight, weight, residual, 1e-5, relu)
            y = None if residual is None else y
            sums, _ = batch_norm_triton.backward_sums(x, x, y, mean, var, weight, weight, 1e-5, relu)
            relu_left = relu and residual is None
            batch_norm_triton.backward_gradient(x, x, mean, var, weight, weight, sums, 2048, 1e-5, relu_left)


def convolutions(_: int) -> None:
    """Launch the kernels for convolutions of a ResNet-50: conv1 and conv3 of its ends, and a downsample of stride 2."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for inputs, outputs, prologue, stride in (
            (64, 64, False, 1), (64, 256, True, 1), (512, 2048, True, 1), (2048, 512, False, 1), (256, 512, False, 2)
        ):  # fmt: skip
            x = torch.empty(4, inputs, 56, 56, dtype=dtype)
            y = torch.empty(4, outputs, 56 // stride, 56 // stride, dtype=dtype)
            weight = torch.empty(outputs, inputs, dtype=dtype)
            mean, parameter = torch.empty(1, inputs), torch.empty(inputs)
            before = None
            if prologue:
                before = conv1x1_triton.norm_coefficients(mean, mean, parameter, parameter, None, 0, 1e-5)
            mean, _ = conv1x1_triton.convolve(x, weight, before, y, 1, stride)
            sums = torch.empty(2, *mean.shape)
            after = conv1x1_triton.norm_coefficients(mean, mean, None, None, sums, 4096, 1e-5)
            for relu in (True, False):
                conv1x1_triton.gradient_of_weight(y, y, after, x, before, relu, stride)
                conv1x1_triton.gradient_of_input(y, y, after, weight, x, before, relu, stride)


LAUNCHES = {
    "whitening": whitening,
    "lars": lars_updates,
    "batch_norm": batch_norms,
    "conv1x1": convolutions,
    "views": augmented_views,
}


def _attributes(arguments: dict[str, Any], fixed: dict[str, Any]) -> dict[tuple[int], list[list[Any]]]:
    """Return the attributes by which a launch says that an address or a number is a multiple of 16."""
    multiples = {}
    for number, (name, value) in enumerate(arguments.items()):
        if name not in fixed and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            multiples[(number,)] = [["tt.divisibility", 16]]
    return multiples


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
        "wide_loads": len(re.findall(r"ld\.global[.\w]*\.v4\.[bf]32", compiled.asm["ptx"])),
        "tensor_cores": "wgmma" in compiled.asm["ptx"] or "mma.sync" in compiled.asm["ptx"],
        "tf32": "tf32" in compiled.asm["ptx"],
        "rounds_products": "tf32" in compiled.asm["ptx"] or "bf16" in compiled.asm["ptx"],
    }


if __name__ == "__main__":
    print(json.dumps([one for what in sys.argv[2:] for one in compile_all(int(sys.argv[1]), what)]))
