"""BatchNorm, residual and ReLU by Triton kernels equal torch's in float64. The kernels are interpreted on a CPU.

tests/integration/test_two_ranks.py tests the statistics of all ranks.
"""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import ROOT
from trainer.config.schema import Config, ModelConfig
from trainer.evaluate.encoders import _plain_model
from trainer.models.batch_norm import ViewBatchNorm, convert_batch_norm
from trainer.models.fused_batch_norm import FusedBatchNorm, fuse_activations
from trainer.models.networks import EncoderProjector
from trainer.tools.memory import estimate_memory

pytest.importorskip("triton", reason="the Triton kernels need the package triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy warns of the tests' NaN

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Largest error of y and of each gradient, relative to their largest value. A GPU rounds to bf16 by 2^-9 and to fp16 by 2^-12;
# the interpreter cuts off the digits that bf16 lacks, which doubles its error.
TOLERANCES = {torch.float64: 1e-7, torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}


def rows_of(shape: tuple[int, ...], *, mean: float = 0.0, seed: int = 0) -> Tensor:
    """Return random rows, channels_last if they are images, whose channels have different means and deviations."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    by_channel = torch.linspace(0.5, 2, shape[1]).double().view(1, -1, *[1] * (len(shape) - 2))
    x = x * by_channel + mean + by_channel
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def batch_norm(channels: int, *, affine: bool = True, bias: bool = True) -> Any:
    """Return a BatchNorm of float32 with weights of both signs."""
    norm = nn.BatchNorm2d(channels, affine=affine)
    if affine:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(-1, 2, channels))
            norm.bias.copy_(torch.linspace(-0.5, 0.5, channels))
    if not bias:
        norm.register_parameter("bias", None)
    return norm


def fused(norm: Any, parts: int = 1, *, relu: bool = False, rows: int = 0, group: str | None = None) -> FusedBatchNorm:
    ours = FusedBatchNorm(norm, parts, group, 1, rows)
    ours.relu = relu
    return ours.to(DEVICE)


def expected_of(norm: Any, x: Tensor, parts: int, residual: Tensor | None, relu: bool) -> Tensor:
    """Return the result of torch's BatchNorm on each part."""
    y = torch.cat([norm(part) for part in x.chunk(parts)])
    if residual is not None:
        y = y + residual
    return F.relu(y) if relu else y


def outputs_and_gradients(
    run: Any, norm: Any, inputs: list[Tensor], dy: Tensor, device: torch.device = DEVICE
) -> list[Tensor]:
    """Return y and the gradients of x, residual, weight and bias, as far as they exist, on the CPU in float64."""
    leaves = [x.detach().to(device).requires_grad_() for x in inputs]
    y = run(*leaves)
    y.backward(dy.to(y))
    tensors = [y.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in norm.parameters())]
    return [tensor.cpu().double() for tensor in tensors if tensor is not None]


def errors_of(
    x: Tensor, dtype: torch.dtype, *, parts: int = 1, residual: bool, relu: bool, training: bool = True, **options: Any
) -> list[float]:
    """Return the largest error of y and of each gradient, relative to its largest value, against float64.

    It may be NaN, so compare each one, because max() may pass over it."""
    # Both get the same values, which `dtype` can hold.
    x, dy = x.to(dtype), rows_of(tuple(x.shape), seed=1).sub(1).to(dtype)
    inputs = [x, rows_of(tuple(x.shape), seed=2).to(dtype)] if residual else [x]
    plain, ours = batch_norm(x.shape[1], **options).double(), batch_norm(x.shape[1], **options)
    ours = fused(ours.double() if dtype == torch.float64 else ours, parts, relu=relu)
    for norm in (plain, ours):
        norm.running_var.copy_(torch.linspace(0.5, 2, x.shape[1]))
        norm.train(training)
    actual = outputs_and_gradients(ours, ours, inputs, dy)
    # torch's BatchNorm2d accepts images only, its function anything.
    plain._check_input_dim = lambda x: None
    expected = outputs_and_gradients(
        lambda x, other=None: expected_of(plain, x, parts, other, relu),
        plain, [i.double() for i in inputs], dy, torch.device("cpu"),
    )  # fmt: skip
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(ours, name).cpu().double(), getattr(plain, name), rtol=1e-5, atol=1e-5)
    return [((a - e).abs().max() / e.abs().max()).item() for a, e in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("residual", "relu"), [(False, False), (False, True), (True, True), (True, False)])
def test_values_and_gradients_equal_those_in_float64(dtype: torch.dtype, residual: bool, relu: bool) -> None:
    errors = errors_of(rows_of((8, 5, 5, 5)), dtype, parts=2, residual=residual, relu=relu)
    assert all(error < TOLERANCES[dtype] for error in errors), errors


@pytest.mark.parametrize(
    ("shape", "parts", "options"),
    [
        ((8, 5, 3, 3), 1, {}),
        ((8, 5, 3, 3), 4, {}),
        ((6, 130), 2, {}),  # rows of a projector, and more channels than a tile has
        ((4, 3, 7), 1, {}),  # three dimensions
        ((4, 1, 1, 1), 1, {}),
        ((300, 16, 3, 3), 2, {"bias": False}),  # several chunks, each of several tiles
        ((16, 5, 3, 3), 2, {"affine": False}),
    ],
)
def test_any_shape_and_missing_parameters_give_right_values(
    shape: tuple[int, ...], parts: int, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.batch_norm_triton.PROGRAMS", 6)
    errors = errors_of(rows_of(shape), torch.float32, parts=parts, residual=True, relu=True, **options)
    assert all(error < 5e-5 for error in errors), errors


@pytest.mark.parametrize("shape", [(8, 5, 3, 3), (64, 5, 6, 6)])
def test_a_mean_of_a_thousand_deviations_costs_no_digits_of_the_variance(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 resolves such a mean to 6e-5 deviations. torch in float32 has errors of up to 4e-3 here."""
    monkeypatch.setattr("kernels.batch_norm_triton.PROGRAMS", 2)
    x = rows_of(shape, mean=1000.0).float()
    _, var = torch.ops.wmse.batch_norm_moments(x.to(DEVICE), 2)
    expected = x.double().unflatten(0, (2, -1)).transpose(1, 2).flatten(2).var(2, correction=0)
    torch.testing.assert_close(var.cpu().double(), expected, rtol=2e-6, atol=0)
    errors = errors_of(x, torch.float32, parts=2, residual=False, relu=False)
    assert all(error < 3e-4 for error in errors), errors


def test_evaluation_uses_the_running_statistics_and_is_differentiable() -> None:
    errors = errors_of(rows_of((6, 5, 3, 3)), torch.float32, residual=True, relu=True, training=False)
    assert all(error < 5e-6 for error in errors), errors


@pytest.mark.parametrize(("parts", "rows"), [(1, 0), (3, 0), (2, 4)])
def test_running_statistics_equal_those_of_a_view_batch_norm(parts: int, rows: int) -> None:
    """12 rows are 3 groups of 4, whatever the number of views."""
    x = rows_of((12, 5, 3, 3)).float()
    plain = convert_batch_norm(nn.Sequential(batch_norm(5)), parts, None, 1, rows)
    ours = fused(batch_norm(5), parts, rows=rows)
    torch.testing.assert_close(ours(x.to(DEVICE)).cpu(), plain(x))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(ours, name).cpu(), getattr(plain[0], name))


def test_the_statistics_of_all_ranks_have_the_right_gradient(group_of_one: str) -> None:
    x, dy = rows_of((8, 5, 3, 3)), rows_of((8, 5, 3, 3), seed=1)
    norms = [batch_norm(5).double() for _ in range(2)]
    views = ViewBatchNorm(norms[0], 2, group_of_one, 1)
    ours = fused(norms[1], 2, group=group_of_one)
    expected = outputs_and_gradients(views, views, [x], dy, torch.device("cpu"))
    torch.testing.assert_close(outputs_and_gradients(ours, ours, [x], dy), expected, rtol=1e-6, atol=1e-6)


def test_gradients_agree_with_finite_differences() -> None:
    """The kernels compute in float64 if x is float64."""
    x, residual = rows_of((4, 3, 2, 2)).to(DEVICE), rows_of((4, 3, 2, 2), seed=1).to(DEVICE)
    for relu in (False, True):
        ours = fused(batch_norm(3).double(), 2, relu=relu)
        inputs = (x.requires_grad_(), residual.requires_grad_(), ours.weight, ours.bias)

        def run(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, ours: Any = ours) -> Tensor:
            return torch.func.functional_call(ours, {"weight": weight, "bias": bias}, (x, residual))

        assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_the_same_input_gives_the_same_bits_in_any_layout() -> None:
    x, residual, dy = (rows_of((8, 5, 3, 3), seed=seed).float() for seed in range(3))
    found = []
    for contiguous in (False, False, True):
        ours = fused(batch_norm(5), 2, relu=True)
        inputs = [tensor.contiguous() if contiguous else tensor for tensor in (x, residual)]
        y = ours(*(tensor.to(DEVICE) for tensor in inputs))
        assert y.is_contiguous(memory_format=torch.channels_last)
        found.append(outputs_and_gradients(ours, ours, inputs, dy))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("residual", [False, True])
def test_a_nan_reaches_the_output_and_the_gradient(residual: bool) -> None:
    """Otherwise a failed step would not be noticed. ReLU as a maximum would replace NaN by 0."""
    x = rows_of((4, 3, 2, 2)).float()
    x[0, 1, 0, 0] = float("nan")
    ours = fused(batch_norm(3), relu=True)
    y, grad_x, *_ = outputs_and_gradients(ours, ours, [x, x] if residual else [x], torch.ones_like(x))
    for tensor in (y, grad_x):
        assert tensor[:, 1].isnan().all()
        assert not tensor[:, (0, 2)].isnan().any()


def test_a_second_derivative_and_unequal_parts_are_refused() -> None:
    x = rows_of((4, 3, 2, 2)).float().to(DEVICE).requires_grad_()
    y = fused(batch_norm(3))(x)
    with pytest.raises(NotImplementedError, match=r"model\.batch_norm_backend to torch"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="3 equal parts, but its input has 4 rows"):
        fused(batch_norm(3), 3)(x)
    with pytest.raises(ValueError, match="at least 2 values for each channel"):
        fused(batch_norm(3))(x[:1, :, :1, :1])


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
@pytest.mark.parametrize(
    ("options", "relus_left"),
    [
        ({}, 0),
        ({"aa_layer": nn.AvgPool2d, "stride": 2}, 0),
        ({"drop_block": lambda: nn.Dropout(0.0)}, 1),  # it lies before one of the ReLUs
        ({"drop_path": nn.Dropout(0.0)}, 1),  # it lies before the addition, like the attention
        ({"attn_layer": "se"}, 2),  # one more is part of the attention
        ({"act_layer": nn.SiLU}, 0),
    ],
)
def test_a_block_of_timm_computes_the_same_whatever_can_be_fused(
    kind: Any, options: dict[str, Any], relus_left: int
) -> None:
    torch.manual_seed(0)
    size = 2 * kind.expansion
    downsample = nn.Sequential(nn.Conv2d(4, size, 1, options.get("stride", 1)), nn.BatchNorm2d(size))
    plain = kind(4, 2, downsample=downsample, **options).double()
    ours = fuse_activations(convert_batch_norm(copy.deepcopy(plain), 1, None, 1, kind=FusedBatchNorm)).to(DEVICE)
    x = rows_of((4, 4, 4, 4))
    dy = plain(x).detach() + 1
    expected = outputs_and_gradients(plain, plain, [x], dy, torch.device("cpu"))
    actual = outputs_and_gradients(ours, ours, [x], dy)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert set(ours.state_dict()) == {name for name in plain.state_dict() if "num_batches" not in name}
    assert sum(isinstance(module, nn.ReLU) for module in ours.modules()) == relus_left


def test_the_relu_of_timms_batch_norm_and_of_a_projector_are_fused() -> None:
    norm = FusedBatchNorm(BatchNormAct2d(4), 1, None, 1)
    assert norm.relu
    assert len(norm.after) == 0
    assert not FusedBatchNorm(BatchNormAct2d(4, apply_act=False), 1, None, 1).relu
    kept = FusedBatchNorm(BatchNormAct2d(4, act_layer=nn.SiLU), 1, None, 1)
    assert not kept.relu
    assert isinstance(kept.after[0], nn.SiLU)


def networks(backend: Any) -> EncoderProjector:
    model = ModelConfig("resnet18", "half", zero_init_last=False, projector_hidden=(6,), embedding_size=4)
    torch.manual_seed(0)
    config = Config(model=replace(model, batch_norm_backend=backend, projector_batch_norm="per_view"))
    return EncoderProjector(config).double().to(DEVICE)


@pytest.mark.slow
def test_a_resnet_18_gives_the_same_embeddings_gradients_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.batch_norm_triton.TILE", 2**16)  # fewer programs to interpret
    plain, ours = networks("torch"), networks("triton")
    assert not any(isinstance(module, nn.ReLU) for module in ours.modules())
    views = rows_of((8, 3, 16, 16)).to(DEVICE)
    embeddings = []
    for model in (plain, ours):
        embeddings.append(model.embed(views))
        embeddings[-1].square().sum().backward()
    torch.testing.assert_close(embeddings[1], embeddings[0], rtol=1e-6, atol=1e-6)
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (plain, ours)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)


def test_an_evaluation_uses_torch() -> None:
    config = Config(model=ModelConfig("resnet18", batch_norm_backend="triton"))
    assert not any(isinstance(module, FusedBatchNorm) for module in _plain_model(config).modules())


def test_less_is_kept_for_backward_than_with_the_statistics_of_all_ranks() -> None:
    """Count the storages of an eager ResNet-50 for 8 views of 224 px in bf16, on fake tensors, which compute nothing."""
    found = []
    for backend, ranks in (("torch", "local"), ("torch", "all"), ("triton", "local"), ("triton", "all")):
        model = ModelConfig("resnet50", batch_norm_backend=backend, batch_norm_ranks=ranks)
        config = Config(model=model, precision="bf16", compile="false")
        found.append(estimate_memory(config, 8, torch.device("cpu")).kept)
    torch_local, torch_all, triton_local, triton_all = found
    assert triton_local == triton_all < 1.001 * torch_local
    assert torch_all > 1.4 * triton_all


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton has an assembler on Linux only")
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_without_spilling_and_load_16_bytes_at_once(capability: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.numerics.compile_kernels", capability, "batch_norm"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {kernel["kernel"] for kernel in kernels} == {
        "partial_moments", "join_moments", "apply", "partial_sums", "gradient"
    }  # fmt: skip
    assert len(kernels) == 4 * (2 + 3 * 3)
    for kernel in kernels:
        assert kernel["spilled"] == 0
        if kernel["COLUMNS"] >= 64:
            assert kernel["wide_loads"] > 0
            assert kernel["registers"] <= 102  # so that five programs of 128 threads fit on a multiprocessor
