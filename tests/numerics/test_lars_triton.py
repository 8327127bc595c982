"""LARS, LARC and SGD with Triton kernels equal the update tensor by tensor.

The kernels are compiled on a GPU, and interpreted on a CPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import ROOT
from trainer.config.schema import OptimizerConfig
from trainer.optimizer import Lars, build_optimizer, gradient_norms, parameter_groups, update

lars_triton = pytest.importorskip("kernels.lars_triton", reason="the Triton kernels need the package triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy warns of the tests' NaN

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
RATES = (0.5, 2.0, 0.1)
# one element, part of a chunk, several chunks with a partial one, weights of convolutions, vectors without adaptation
SHAPES = [(1, 1), (3, 1), (lars_triton.CHUNK + 1, 1), (5, 4096), (8, 3, 3, 3), (6, 4, 1, 1), (7,), (64,)]
# all sizes are multiples of four, so that the kernels load four elements at once
ALIGNED_SHAPES = [(4, 1), (8, 2), (lars_triton.CHUNK + 4, 1), (5, 4096), (8, 3, 3, 3), (64,)]


class Tensors(nn.Module):
    """Module with a weight of each shape, channels_last if it has four dimensions. The second weight is zero."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) for shape in shapes]
        weights[1].zero_()
        self.weights = nn.ParameterList(weights).to(DEVICE).to(memory_format=torch.channels_last)


def optimizer_of(model: nn.Module, *, by_triton: bool, weight_decay: float = 1e-2) -> Lars:
    return Lars(parameter_groups(model, weight_decay), by_triton=by_triton)


def set_gradients(model: nn.Module, step: int, *, like_weights: bool = True) -> None:
    """Give each weight a new gradient tensor. like_weights: with the strides of the weight, as torch's backward makes it."""
    generator = torch.Generator().manual_seed(step)
    for number, p in enumerate(model.parameters()):
        g = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        g.mul_(number != 3)  # a gradient of zero
        p.grad = torch.empty_like(p).copy_(g) if like_weights else g


def tensors_of(optimizer: Lars) -> list[Tensor]:
    """Return weights and momentum."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    return [x for p in weights for x in (p.detach(), optimizer.state[p]["momentum_buffer"])]


def bit(value: bool) -> Tensor:
    return torch.tensor(value, device=DEVICE)


@pytest.mark.parametrize(
    ("shapes", "like_weights", "weight_decay", "dtype"),
    [
        (SHAPES, True, 1e-2, torch.float64),
        (SHAPES, True, 0.0, torch.float32),
        (SHAPES, False, 1e-2, torch.float64),
        (ALIGNED_SHAPES, True, 1e-2, torch.float64),
    ],
)
def test_updates_equal_those_tensor_by_tensor(
    shapes: list[tuple[int, ...]], like_weights: bool, weight_decay: float, dtype: torch.dtype
) -> None:
    """Gradients have other addresses in each step. Those of convolutions are channels_last like the weights, or not."""
    ours, plain = Tensors(shapes), Tensors(shapes).to("cpu", dtype)
    fast = optimizer_of(ours, by_triton=True, weight_decay=weight_decay)
    slow = optimizer_of(plain, by_triton=False, weight_decay=weight_decay)
    kept = []
    for step, rate in enumerate(RATES):
        for model, optimizer in ((ours, fast), (plain, slow)):
            set_gradients(model, step, like_weights=like_weights)
            kept.append([p.grad for p in model.parameters()])  # so that no address is used again
            update(optimizer, rate, torch.tensor(False, device=next(model.parameters()).device))
    for actual, expected in zip(tensors_of(fast), tensors_of(slow), strict=True):
        assert not expected.isnan().any()
        torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [None, 2.0**16])
@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(name="sgd", momentum=0.9, weight_decay=1e-2),
        OptimizerConfig(name="larc", weight_decay=1e-2),
        OptimizerConfig(name="lars", weight_decay=1e-2, rate_in_momentum=False),
    ],
)
def test_every_rule_equals_torch_also_with_a_loss_scale(config: OptimizerConfig, scale: float | None) -> None:
    """With a scale, the gradients of both are multiplied by it, as fp16's are."""
    ours, plain = Tensors(SHAPES), Tensors(SHAPES).to("cpu", torch.float64)
    fast = build_optimizer(ours, replace(config, backend="triton"), DEVICE)
    slow = build_optimizer(plain, replace(config, backend="torch"), torch.device("cpu"))
    for step, rate in enumerate(RATES):
        for model, optimizer in ((ours, fast), (plain, slow)):
            set_gradients(model, step)
            gradients = [p.grad.mul_(scale or 1.0) for p in model.parameters() if p.grad is not None]
            device = gradients[0].device
            in_step = None if scale is None else torch.tensor(scale, device=device)
            norms = gradient_norms(optimizer, gradients, in_step)
            assert torch.stack(norms).isfinite().all()
            if in_step is not None:
                in_step.mul_(2)  # the scaler may change it before the update
            update(optimizer, rate, torch.tensor(False, device=device))
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_one_bad_element_of_any_gradient_shows_in_the_norms(number: int, value: float) -> None:
    model = Tensors(SHAPES)
    optimizer = optimizer_of(model, by_triton=True)
    set_gradients(model, 0)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert torch.stack(gradient_norms(optimizer, gradients)).isfinite().all()
    gradients[number].flatten()[-1:].fill_(value) if gradients[number].is_contiguous() else gradients[number].fill_(
        value
    )
    assert not torch.stack(gradient_norms(optimizer, gradients)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_a_skipped_update_changes_no_bit_and_the_next_one_is_applied(value: float) -> None:
    model, unbroken = Tensors(SHAPES), Tensors(SHAPES)
    optimizer, other = optimizer_of(model, by_triton=True), optimizer_of(unbroken, by_triton=True)
    for step, rate in enumerate(RATES):
        for m, o in ((model, optimizer), (unbroken, other)):
            set_gradients(m, step)
            update(o, rate, bit(False))
        before = [x.clone() for x in tensors_of(optimizer)]
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.found_inf = bit(True).float()  # type: ignore[attr-defined]
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer), before, strict=True))
        optimizer.found_inf.zero_()
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer), tensors_of(other), strict=True))


def test_missing_gradients_and_a_loaded_state_are_handled() -> None:
    """A parameter without a gradient is not updated, and the momentum of a checkpoint has another address."""
    ours, plain = Tensors(SHAPES), Tensors(SHAPES)
    fast, slow = optimizer_of(ours, by_triton=True), optimizer_of(plain, by_triton=False)
    for step, without_gradient in enumerate((None, 2, None)):
        for model, optimizer in ((ours, fast), (plain, slow)):
            set_gradients(model, step)
            if without_gradient is not None:
                list(model.parameters())[without_gradient].grad = None
            optimizer.load_state_dict(optimizer.state_dict())
            update(optimizer, 0.5, bit(False))
    for actual, expected in zip(tensors_of(fast), tensors_of(slow), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_norm_of_a_tensor_with_many_chunks_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lars_triton, "CHUNK", 64)
    monkeypatch.setattr(lars_triton, "BLOCK", 32)
    shapes = [(5, 4096), (3, 1)]
    ours, plain = Tensors(shapes), Tensors(shapes)
    for model, by_triton in ((ours, True), (plain, False)):
        with torch.no_grad():
            model.weights[0][4:] *= 10  # the norm lies in the last chunks
        set_gradients(model, 0)
        update(optimizer_of(model, by_triton=by_triton), 5.0, bit(False))
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_gradients_without_16_byte_alignment_are_applied() -> None:
    """DDP's gradients are views of a bucket, which may have such addresses."""
    shapes = [(4, 4), (8, 2)]
    ours, plain = Tensors(shapes), Tensors(shapes)
    for model, by_triton in ((ours, True), (plain, False)):
        bucket = torch.arange(33, dtype=torch.float32, device=DEVICE)
        for number, p in enumerate(model.parameters()):
            p.grad = bucket[1 + 16 * number : 17 + 16 * number].view(p.shape)
        update(optimizer_of(model, by_triton=by_triton), 0.5, bit(False))
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton has an assembler on Linux only")
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_without_spilling_and_load_four_elements_at_once(capability: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.numerics.compile_kernels", capability, "lars"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert [kernel["kernel"] for kernel in kernels] == ["squares", "update"] * 6
    for kernel in kernels:
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= 80  # so that six programs of 128 threads fit on a multiprocessor
        assert (kernel["wide_loads"] > 0) == kernel["ALIGNED"]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: kernels are interpreted here")
@pytest.mark.parametrize("shapes", [SHAPES, ALIGNED_SHAPES])
def test_updates_on_a_gpu_equal_foreach_and_do_not_synchronize(shapes: list[tuple[int, ...]]) -> None:
    ours, plain = Tensors(shapes), Tensors(shapes)
    fast, slow = optimizer_of(ours, by_triton=True), optimizer_of(plain, by_triton=False)
    for step, rate in enumerate(RATES):
        set_gradients(ours, step)
        set_gradients(plain, step)
        failed = bit(step == 1)
        update(slow, rate, failed)
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step compiles
        try:
            update(fast, rate, failed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for actual, expected in zip(tensors_of(fast), tensors_of(slow), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
