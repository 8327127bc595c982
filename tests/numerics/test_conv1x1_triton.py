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
import timm
import torch
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import conv1x1
from tests.conftest import ROOT
from tests.numerics.test_batch_norm_triton import TOLERANCES, batch_norm, rows_of
from trainer.config.schema import Config, ModelConfig
from trainer.errors import InputError
from trainer.models.batch_norm import convert_batch_norm
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


CASES: list[dict[str, Any]] = [
    {"prologue": True, "residual": True},
    {"prologue": True, "residual": True, "parts": 4},
    {"prologue": False},
    {"prologue": False, "relu": False, "parts": 2, "stride": 2},
    {"prologue": True, "relu": False, "stride": 2},
    {"prologue": True, "relu": False, "training": False},
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_statistics_equal_those_in_float64(dtype: torch.dtype, case: dict[str, Any]) -> None:
    """The activation, y and the gradient between the kernels are rounded, too, so the errors are larger than one rounding."""
    errors = errors_of(rows_of((8, 19, 5, 5)), dtype, **case)
    assert all(error < 3 * TOLERANCES[dtype] for error in errors.values()), errors


@pytest.mark.parametrize(
    ("shape", "outputs", "case"),
    [
        ((4, 3, 1, 1), 2, {"prologue": True}),
        ((3, 70, 3, 5), 35, {"prologue": True}),  # more channels than a tile has, in and out
        ((3, 35, 3, 5), 150, {"prologue": False, "stride": 2}),
        ((12, 5, 9, 7), 3, {"prologue": True, "residual": True, "parts": 3}),  # several chunks, each of several tiles
        ((12, 5, 9, 7), 3, {"prologue": False, "parts": 2, "stride": 2}),
    ],
)
def test_any_numbers_of_rows_and_channels_give_right_values(
    shape: tuple[int, ...], outputs: int, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.batch_norm_triton.PROGRAMS", 6)
    monkeypatch.setattr("kernels.conv1x1_triton.WEIGHT_PROGRAMS", 6)
    errors = errors_of(rows_of(shape), torch.float32, outputs=outputs, **case)
    assert all(error < 5e-5 for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_the_statistics_are_those_of_the_stored_output(
    dtype: torch.dtype, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mean of a thousand deviations, float32 resolves 6e-5 deviations. torch in float32 has errors of up to 4e-3 here."""
    monkeypatch.setattr("kernels.batch_norm_triton.PROGRAMS", 6)
    x = rows_of((12, 5, 9, 7), mean=mean).to(DEVICE, dtype)
    weight = torch.eye(5, device=DEVICE, dtype=dtype)
    y, found_mean, found_var = conv1x1.forward(x, weight, None, 2, 1)
    stored = y.double().unflatten(0, (2, -1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found_mean.double(), stored.mean(2), rtol=2e-7, atol=1e-8)
    torch.testing.assert_close(found_var.double(), stored.var(2, correction=0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("stride", [1, 2])
def test_operators_say_the_shapes_and_types_of_their_results(stride: int) -> None:
    """torch.compile needs them."""
    x = rows_of((4, 5, 3, 3)).to(DEVICE, torch.bfloat16)
    weight = torch.ones(7, 5, device=DEVICE, dtype=torch.bfloat16)
    mean = torch.ones(2, 5, device=DEVICE)
    before = conv1x1.coefficients(mean, mean, None, None, None, 0, 1e-5)
    y, mean, var = conv1x1.forward(x, weight, before, 2, stride)
    sums = torch.ones(2, 2, 7, device=DEVICE)
    after = conv1x1.coefficients(mean, var, None, None, sums, 10, 1e-5)
    for operator, arguments in (
        (conv1x1.coefficients, (mean, var, None, None, sums, 10, 1e-5)),
        (conv1x1.forward, (x, weight, before, 2, stride)),
        (conv1x1.weight_gradient, (y, y, after, x, before, True, stride)),
        (conv1x1.input_gradient, (y, y, after, weight, x, before, True, stride)),
        (conv1x1.input_gradient, (y, y, after, weight, x, None, True, stride)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_same_input_gives_the_same_bits_in_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.batch_norm_triton.PROGRAMS", 6)
    inputs = [rows_of((6, 5, 7, 7)).float(), rows_of((6, 3, 7, 7), seed=1).float()]
    dy = rows_of((6, 3, 7, 7), seed=2).float()
    torch.manual_seed(0)
    ours = converted(Layers(5, 3, prologue=True, relu=True), 2)
    found = []
    for layout in (torch.channels_last, torch.channels_last, torch.contiguous_format):
        given = [tensor.contiguous(memory_format=layout) for tensor in inputs]
        found.append(results_of(copy.deepcopy(ours), given, dy))
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


@pytest.mark.parametrize("prologue", [False, True])
def test_a_nan_reaches_the_output_and_the_gradients(prologue: bool) -> None:
    """Otherwise a failed step would not be noticed."""
    x = rows_of((4, 3, 2, 2)).float()
    x[0, 1, 0, 0] = float("nan")
    ours = converted(Layers(3, 5, prologue=prologue, relu=True), 1)
    found = results_of(ours, [x], torch.ones(4, 5, 2, 2))
    for name in ("y", "input 0", "convolution.weight"):
        assert found[name].isnan().any(), name


def test_autocast_gives_outputs_of_its_type_and_gradients_of_the_weights_type() -> None:
    x = rows_of((4, 5, 3, 3)).float().to(DEVICE).requires_grad_()
    ours = converted(Layers(5, 3, prologue=True, relu=True), 1)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = ours(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == ours.convolution.weight.grad.dtype == torch.float32
    with pytest.raises(NotImplementedError, match=r"model\.batch_norm_backend to torch"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)


def test_the_statistics_of_all_ranks_have_the_right_gradient(group_of_one: str) -> None:
    x, dy = rows_of((8, 5, 3, 3)), rows_of((8, 3, 3, 3), seed=1)
    torch.manual_seed(0)
    plain: Any = Layers(5, 3, prologue=True, relu=True).double()
    ours = converted(plain, 2, group_of_one)
    plain = convert_batch_norm(plain, 2, group_of_one, 1)
    errors = largest_errors(results_of(ours, [x], dy), results_of(plain, [x], dy, torch.device("cpu")))
    assert all(error < 1e-6 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({}, True),
        ({"stride": 2}, True),
        ({"aa_layer": nn.AvgPool2d, "stride": 2}, False),
        ({"drop_block": lambda: nn.Dropout(0.0)}, False),
        ({"attn_layer": "se"}, False),
        ({"act_layer": nn.SiLU}, False),
    ],
)
def test_a_bottleneck_computes_the_same_or_is_refused(options: dict[str, Any], is_fused: bool) -> None:
    torch.manual_seed(0)
    downsample = nn.Sequential(nn.Conv2d(4, 8, 1, options.get("stride", 1), bias=False), nn.BatchNorm2d(8))
    plain: Any = nn.Sequential(Bottleneck(4, 2, downsample=downsample, **options)).double()
    plain = plain.to(memory_format=torch.channels_last)
    ours = fuse_activations(convert_batch_norm(copy.deepcopy(plain), 1, None, 1, kind=FusedBatchNorm)).to(DEVICE)
    if not is_fused:
        with pytest.raises(InputError, match="odd has none that it can fuse: set it to triton"):
            fuse_convolutions(ours, "odd")
        return
    fuse_convolutions(ours, "odd")
    assert set(ours.state_dict()) == {name for name in plain.state_dict() if "num_batches" not in name}
    x = rows_of((4, 4, 5, 5))
    dy = plain(x).detach() + 1
    for norm in plain.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
    errors = largest_errors(results_of(ours, [x], dy), results_of(plain, [x], dy, torch.device("cpu")))
    assert all(error < 1e-6 for error in errors.values()), errors
    weights = [module.weight for module in ours.modules() if isinstance(module, nn.Conv2d)]
    # DDP warns if a gradient has another layout.
    assert all(weight.grad is not None and weight.grad.stride() == weight.stride() for weight in weights)


def test_a_model_without_bottlenecks_is_refused() -> None:
    model = ModelConfig("resnet18", batch_norm_backend="triton_conv")
    with pytest.raises(
        InputError, match=r"triton_conv fuses the bottleneck blocks .* resnet18 has none .*: set it to triton"
    ):
        EncoderProjector(Config(model=model))


def networks(backend: Any, monkeypatch: pytest.MonkeyPatch, *, zero_init_last: bool) -> EncoderProjector:
    """Return a ResNet of four bottleneck blocks with few channels, and its projector."""

    def narrow(config: ModelConfig, views: Any = None) -> Any:
        encoder: Any = ResNet(Bottleneck, (1, 1, 1, 1), num_classes=0, channels=(4, 4, 5, 6))
        encoder.init_weights(config.zero_init_last)
        return encoder.to(memory_format=torch.channels_last)

    monkeypatch.setattr("trainer.models.networks.build_encoder", narrow)
    model = ModelConfig("resnet26", zero_init_last=zero_init_last, projector_hidden=(6,), embedding_size=4)
    torch.manual_seed(0)
    config = Config(model=replace(model, batch_norm_backend=backend, encoder_batch_norm="per_view"))
    return EncoderProjector(config).to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance", "zero_init_last"),
    [(torch.float64, 1e-6, False), (torch.float32, 5e-3, True)],
)
def test_a_resnet_has_the_same_loss_gradients_names_and_statistics(
    dtype: torch.dtype, tolerance: float, zero_init_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 a ReLU near 0 may be cut off by one and not by the other, so gradients differ more than values."""
    monkeypatch.setattr("kernels.batch_norm_triton.TILE", 2**14)  # fewer programs to interpret
    monkeypatch.setattr("kernels.batch_norm_triton.PROGRAMS", 4)
    monkeypatch.setattr("kernels.conv1x1_triton.WEIGHT_PROGRAMS", 4)
    views = rows_of((8, 3, 24, 24)).to(DEVICE, dtype)
    losses, gradients, states = [], [], []
    for backend in ("torch", "triton_conv"):
        model = networks(backend, monkeypatch, zero_init_last=zero_init_last).to(dtype)
        loss = (model.embed(views) - 1).square().mean()
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        states.append(model.state_dict())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= tolerance * expected.norm(), name


def test_less_is_kept_for_backward() -> None:
    """Count the storages of an eager ResNet-50 for 8 views of 224 px in bf16, on fake tensors, which compute nothing."""
    kept = {}
    for backend in ("triton", "triton_conv"):
        config = Config(model=ModelConfig("resnet50", batch_norm_backend=backend), precision="bf16", compile="false")
        kept[backend] = estimate_memory(config, 8, torch.device("cpu")).kept
    assert kept["triton_conv"] < 0.95 * kept["triton"]


def memory_traffic(passes: dict[str, int], additions: int) -> tuple[float, float, float]:
    """Return MB that the convolutions, BatchNorms and additions of gradients of a ResNet-50 read and write for a view in bf16.

    passes: reads and writes of a BatchNorm's output by all of its passes, by the last part of its name; stem: the first one.
    additions: reads and writes of the input of a block, to add the gradients of its two paths. Weights are left out."""
    model = timm.create_model("resnet50", num_classes=0).to("meta")
    convolutions = norms = inputs = 0

    def count(name: str, module: Any, x: Tensor, y: Tensor) -> None:
        nonlocal convolutions, norms, inputs
        if isinstance(module, nn.Conv2d):
            # A 1x1 convolution with a stride reads only the pixels that it uses.
            read = x.numel() // (module.stride[0] ** 2 if module.kernel_size == (1, 1) else 1)
            # forward, gradient of the weight, and, except for pixels, gradient of the input
            convolutions += 2 * (read + y.numel()) + (x.numel() + y.numel()) * (name != "conv1")
        elif isinstance(module, nn.BatchNorm2d):
            kind = "stem" if name == "bn1" else name.rpartition(".")[2]
            norms += passes[kind] * y.numel()
        elif isinstance(module, Bottleneck):
            inputs += x.numel()

    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, x, y, name=name: count(name, module, x[0], y))
    model(torch.empty(1, 3, 224, 224, device="meta"))
    return tuple(round(2 * size / 1e6, 1) for size in (convolutions, norms, additions * inputs))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("backend", "passes", "additions"),
    [  # the BatchNorms of the stem, of a block, and of the shortcut, whose module has the number 1
        ("eager torch", {"stem": 13, "bn1": 13, "bn2": 13, "bn3": 16, "1": 8}, 3),
        ("compiled torch", {"stem": 10, "bn1": 10, "bn2": 10, "bn3": 12, "1": 8}, 1),
        ("`triton`", {"stem": 8, "bn1": 8, "bn2": 8, "bn3": 11, "1": 8}, 3),
        ("`triton_conv`", {"stem": 8, "bn1": 6, "bn2": 5, "bn3": 9, "1": 6}, 3),
    ],
)
def test_the_readme_has_the_memory_traffic(backend: str, passes: dict[str, int], additions: int) -> None:
    found = memory_traffic(passes, additions)
    cells = [f"{size:.0f}" for size in (*found, sum(found))]
    assert f"| {backend} | {' | '.join(cells)} |" in (ROOT / "kernels" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton has an assembler on Linux only")
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_without_spilling_and_use_tensor_cores(capability: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.numerics.compile_kernels", capability, "conv1x1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [kernel for kernel in json.loads(done.stdout) if kernel["kernel"] != "join_moments"]
    products = [kernel for kernel in kernels if kernel["kernel"] != "coefficients"]
    assert {kernel["kernel"] for kernel in products} == {"forward", "weight_gradient", "input_gradient"}
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
    for kernel in products:
        assert kernel["tensor_cores"] == (kernel["type"] != "fp32"), kernel
        assert not kernel["tf32"]
        # Two programs of 128 threads or one of 256 must fit.
        assert kernel["shared"] <= 100 * 1024
