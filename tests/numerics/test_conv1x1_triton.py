"""1x1 convolutions fused with BatchNorm by Triton kernels equal torch's in float64. The kernels are interpreted on a CPU.

tests/integration/test_two_ranks.py tests the statistics of all ranks.
"""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import conv1x1
from tests.conftest import ROOT
from tests.numerics.test_batch_norm_triton import TOLERANCES, batch_norm, rows_of
from trainer.config.schema import Config, ModelConfig
from trainer.errors import InputError
from trainer.models.batch_norm import convert_batch_norm
from trainer.models.encoder import build_encoder
from trainer.models.fused_batch_norm import FusedBatchNorm, fuse_activations
from trainer.models.fused_convolution import convolve_and_normalise, fuse_convolutions
from trainer.models.networks import EncoderProjector
from trainer.tools.memory import estimate_memory

pytest.importorskip("triton", reason="the Triton kernels need the package triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy warns of the tests' NaN

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bf16, whose bits it otherwise takes for whole numbers."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def as_float32(handle: Any) -> Any:
        if handle.dtype.scalar != bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, as_float32(a), as_float32(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class Layers(nn.Module):
    """before, ReLU, convolution, norm, residual and ReLU: `before`, the residual and the last ReLU may be left out."""

    def __init__(self, inputs: int, outputs: int, *, prologue: bool, relu: bool, stride: int = 1) -> None:
        super().__init__()
        self.before = batch_norm(inputs) if prologue else None
        self.convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norm = batch_norm(outputs)
        self.relu = relu

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.before is not None:
            x = F.relu(self.before(x))
        y = self.norm(self.convolution(x))
        y = y if residual is None else y + residual
        return F.relu(y) if self.relu else y


class FusedLayers(Layers):
    """The same by the kernels, after `converted`."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return convolve_and_normalise(x, self.convolution, self.norm, residual=residual, before=self.before)


def converted(plain: Layers, parts: int, group: str | None = None) -> FusedLayers:
    """Return the same layers by the kernels."""
    ours: Any = convert_batch_norm(copy.deepcopy(plain), parts, group, 1, kind=FusedBatchNorm)
    ours.__class__ = FusedLayers
    ours.norm.relu = plain.relu
    if ours.before is not None:
        ours.before.relu = True
    return ours.to(DEVICE)


def results_of(layers: nn.Module, inputs: list[Tensor], dy: Tensor, device: torch.device = DEVICE) -> dict[str, Tensor]:
    """Return y, the gradients of inputs and parameters, and the running statistics, on the CPU in float64."""
    leaves = [tensor.detach().to(device).requires_grad_() for tensor in inputs]
    y = layers(*leaves)
    y.backward(dy.to(y))
    found = {"y": y.detach()} | {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}
    found |= {name: parameter.grad for name, parameter in layers.named_parameters()}
    found |= {name: buffer for name, buffer in layers.named_buffers() if "running" in name}
    return {name: tensor.cpu().double() for name, tensor in found.items()}


def largest_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each result relative to its largest value. It may be NaN."""
    assert found.keys() == expected.keys()
    return {name: ((found[name] - e).abs().max() / e.abs().max()).item() for name, e in expected.items()}


def errors_of(
    x: Tensor,
    dtype: torch.dtype,
    *,
    outputs: int = 7,
    parts: int = 1,
    prologue: bool,
    residual: bool = False,
    relu: bool = True,
    stride: int = 1,
    training: bool = True,
) -> dict[str, float]:
    """Return the errors of the kernels in `dtype` against torch in float64, for the same values."""
    torch.manual_seed(0)
    plain: Any = Layers(x.shape[1], outputs, prologue=prologue, relu=relu, stride=stride)
    with torch.no_grad():
        plain.convolution.weight.copy_(plain.convolution.weight.to(dtype))
    ours = converted(plain, parts)
    if dtype == torch.float64:
        ours = ours.double()
    plain = convert_batch_norm(plain.double(), parts, None, 1)
    for layers in (plain, ours):
        layers.train(training)
    inputs = [x.to(dtype)]
    dy = plain(x.double()).detach()
    dy = rows_of(tuple(dy.shape), seed=1).sub(1).to(dtype)
    if residual:
        inputs.append(rows_of(tuple(dy.shape), seed=2).to(dtype))
    for layers in (plain, ours):
        for name, buffer in layers.named_buffers():
            if "running" in name:
                buffer.copy_(torch.linspace(0.5, 2, len(buffer)))
    expected = results_of(plain, [tensor.double() for tensor in inputs], dy, torch.device("cpu"))
    return largest_errors(results_of(ours, inputs, dy), expected)
