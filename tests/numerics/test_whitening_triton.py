"""The Triton kernels equal the definition: at all sizes on a GPU, and at a few small ones interpreted on a CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import backends
from kernels.whitening import whiten, whiten_with_status
from tests.conftest import ROOT
from tests.numerics.whitening_cases import (
    FAULTS,
    assert_as_good_as_plain_float32,
    definition,
    random_like,
    relative_error,
    rows_of_condition,
    spoil,
    value_and_gradient,
)
from trainer.losses.wmse import wmse_loss

whitening_triton = pytest.importorskip("kernels.whitening_triton", reason="the Triton kernels need the package triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy warns of the tests' NaN

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: kernels are interpreted here")

# (slices, rows, size): one panel and several, full and partial tiles, few rows and many
SIZES = [(2, 5, 2), (1, 40, 8), (2, 33, 16), (1, 70, 33), (1, 100, 64)]
if ON_GPU:
    SIZES += [(4096, 16, 8), (8, 128, 64), (3, 101, 100), (4, 256, 128), (64, 256, 128), (2, 300, 150), (2, 513, 256)]
    SIZES += [(1, 4096, 64), (3, 700, 321), (2, 1024, 512), (1, 513, 512)]
CONDITIONED = [(8, 128, 64), (8, 256, 128), (8, 45, 17), (4, 512, 256)] if ON_GPU else [(2, 45, 17), (1, 80, 40)]


def triton_whiten(x: Tensor, eps: float = 0.0) -> Tensor:
    return whiten(x, eps=eps, backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "num_rows", "size"), SIZES)
@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_value_and_gradient_are_accurate_at_all_sizes(batch, num_rows, size, eps):
    x = rows_of_condition(batch, num_rows, size, 1e2).to(DEVICE) + 1
    assert_as_good_as_plain_float32(triton_whiten, x, eps)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "num_rows", "size"), CONDITIONED)
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_value_and_gradient_are_accurate_for_ill_conditioned_rows(batch, num_rows, size, condition):
    assert_as_good_as_plain_float32(triton_whiten, rows_of_condition(batch, num_rows, size, condition).to(DEVICE))


@pytest.mark.slow
@settings(max_examples=100 if ON_GPU else 8, deadline=None)
@given(
    batch=st.integers(1, 2),
    size=st.integers(1, 100 if ON_GPU else 18),
    extra=st.integers(8, 20),
    exponent=st.floats(2, 6),
    scale=st.floats(-5, 5).map(lambda exponent: 10**exponent),
    shift=st.sampled_from([0, 1, -3, 10]),
    eps=st.sampled_from([0.0, 1e-4, 0.3]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_are_accurate_at_random_sizes(batch, size, extra, exponent, scale, shift, eps, seed):
    x = (rows_of_condition(batch, size + extra, size, 10**exponent, scale, seed) + shift * scale).to(DEVICE)
    assert whiten_with_status(x.float(), eps=eps, backend="triton")[1].ok.all()
    assert_as_good_as_plain_float32(triton_whiten, x, eps, seed=seed, drawn=True)


def test_whitened_rows_have_zero_mean_and_identity_covariance():
    x = rows_of_condition(2, 45, 17, 1e2).to(DEVICE, torch.bfloat16) + 2
    z = triton_whiten(x)
    assert z.dtype == torch.float32
    assert z.mean(1).abs().max() < 1e-5
    for rows in z:
        assert (torch.cov(rows.T) - torch.eye(17, device=DEVICE)).abs().max() < 1e-4


def test_slices_are_independent_and_order_scale_and_shift_do_not_matter():
    x = rows_of_condition(3, 21, 6, 1e1).float().to(DEVICE)
    grad_z = random_like(x)
    z, gradient = value_and_gradient(triton_whiten, x, grad_z)
    slices = torch.tensor([2, 0, 1], device=DEVICE)
    permuted = value_and_gradient(triton_whiten, x[slices], grad_z[slices])
    assert torch.equal(permuted[0], z[slices])
    assert torch.equal(permuted[1], gradient[slices])
    rows = torch.randperm(21, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scale, shift = torch.logspace(-4, 4, 6, device=DEVICE), torch.linspace(-2, 2, 6, device=DEVICE)
    moved = value_and_gradient(triton_whiten, (x[:1, rows] + shift) * scale, grad_z[:1, rows])
    assert relative_error(moved[0], z[:1, rows]) < 1e-5
    assert relative_error(moved[1] * scale, gradient[:1, rows]) < 1e-5


def test_rows_and_gradients_may_have_any_strides():
    x = rows_of_condition(1, 17, 8, 1e2).float().to(DEVICE)
    grad_z = random_like(x)
    expected = value_and_gradient(triton_whiten, x, grad_z)
    strided = value_and_gradient(lambda x: triton_whiten(x.mT.contiguous().mT), x, grad_z)
    assert all(torch.equal(a, b) for a, b in zip(strided, expected, strict=True))
    same = torch.ones((), device=DEVICE).expand(x.shape)
    expanded = value_and_gradient(triton_whiten, x, same)
    assert torch.equal(expanded[1], value_and_gradient(triton_whiten, x, same.contiguous())[1])


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "eps"), FAULTS if ON_GPU else [*FAULTS[0:8:3], *FAULTS[8:]])
@pytest.mark.parametrize("bad", [0, 1] if ON_GPU else [0])
def test_a_slice_that_fails_does_not_change_the_others(fault, eps, bad):
    x = rows_of_condition(2, 19, 17, 1e2).float().to(DEVICE)
    grad_z = random_like(x)
    clean = value_and_gradient(lambda x: triton_whiten(x, eps), x, grad_z)
    spoil(x[bad], fault)
    grad_z[bad] = float("nan")
    spoiled = value_and_gradient(lambda x: triton_whiten(x, eps), x, grad_z)
    status = whiten_with_status(x, eps=eps, backend="triton")[1]
    good = [i for i in range(2) if i != bad]
    assert status.ok.tolist() == [i != bad for i in range(2)]
    assert status.min_pivot[bad] == 0
    for before, after in zip(clean, spoiled, strict=True):
        assert (after[bad] == 0).all()
        assert torch.equal(after[good], before[good])


# with scale 123457.7 the mean of the constant column is not a float32 number, so that rounding makes noise
@pytest.mark.parametrize("scale", [1.0, 123457.7])
def test_every_slice_with_a_dependent_or_constant_column_is_refused(scale):
    """The constant column is in the first panel of two, the dependent one in the last."""
    batch = 100 if ON_GPU else 2
    x = scale * torch.randn(batch, 60, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    dependent, constant = x.clone(), x.clone()
    dependent[:, :, -1] = 1.7 * x[:, :, 0]
    constant[:, :, 3] = scale * torch.linspace(-9.7, 10.3, batch, device=DEVICE)[:, None]
    assert not whiten_with_status(dependent, backend="triton")[1].ok.any()
    assert not whiten_with_status(constant, backend="triton")[1].ok.any()


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_the_status_equals_that_of_the_reference(eps):
    """The smallest pivot is in the first panel of two."""
    x = rows_of_condition(2, 60, 40, 1e3).to(DEVICE) + 1
    x[:, :, 0] *= 0.01
    expected = whiten_with_status(x, eps=eps, backend="reference")[1]
    status = whiten_with_status(x.float(), eps=eps, backend="triton")[1]
    assert status.ok.all()
    assert status.ok.dtype == torch.bool
    torch.testing.assert_close(status.min_pivot.double(), expected.min_pivot, rtol=1e-4, atol=0)


def test_the_kernels_ignore_autocast():
    x = rows_of_condition(1, 17, 8, 1e3).float().to(DEVICE)
    expected = value_and_gradient(triton_whiten, x, x)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        ours = value_and_gradient(triton_whiten, x, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_the_loss_uses_these_kernels(monkeypatch):
    v = rows_of_condition(1, 64, 8, 1e2)[0].to(DEVICE)
    sizes = {"num_views": 2, "slice_size": 16, "permutations": torch.randperm(32, device=DEVICE)[None]}
    expected = wmse_loss(v, **sizes, backend="reference")
    assert wmse_loss(v.float(), **sizes, backend="triton").item() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(ValueError, match="float32 only; use backend='auto' or 'torch'"):
        wmse_loss(v.float(), **sizes, backend="triton", cholesky_float64=True)
    monkeypatch.setattr("kernels.whitening_triton.forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wmse_loss(v.float(), **sizes, backend="triton")


def test_the_whitening_compiles_as_one_graph():
    x = rows_of_condition(2, 33, 8, 1e2).float().to(DEVICE)
    eager = value_and_gradient(lambda x: triton_whiten(2 * x, 0.1), x, x)
    compiled = torch.compile(lambda x: triton_whiten(2 * x, 0.1), fullgraph=True, backend="aot_eager")
    for actual, expected in zip(value_and_gradient(compiled, x, x), eager, strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_operator_declares_its_outputs():
    arguments = (rows_of_condition(1, 9, 4, 1e1).float().to(DEVICE), 0.1, False, "triton")
    torch.library.opcheck(torch.ops.wmse.whiten, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_gradient_uses_these_kernels(monkeypatch):
    x = rows_of_condition(1, 9, 4, 1e1).float().to(DEVICE)
    monkeypatch.setattr("kernels.whitening_triton.backward", lambda grad_z, *_: 7 * grad_z)
    assert torch.equal(value_and_gradient(triton_whiten, x, x)[1], 7 * x)


def test_a_second_derivative_is_refused():
    x = rows_of_condition(1, 9, 4, 1e1).float().to(DEVICE).requires_grad_()
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(triton_whiten(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "keywords", "message"),
    [
        ((1, 9, 4), torch.float64, {}, "'triton' whitens in float32 only; use backend='auto' or 'torch'"),
        ((1, 9, 4), torch.float32, {"cholesky_float64": True}, "float32 only; use backend='auto' or 'torch'"),
        ((1, 600, 513), torch.float32, {}, "at most 512 dimensions, not 513"),
    ],
)
def test_unsupported_dtypes_and_sizes_are_refused(shape, dtype, keywords, message):
    with pytest.raises(ValueError, match=message):
        whiten(torch.zeros(shape, dtype=dtype, device=DEVICE), backend="triton", **keywords)


def test_a_machine_that_cannot_run_the_kernels_is_refused(monkeypatch):
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        whiten(torch.zeros(1, 9, 4), backend="triton")
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    with pytest.raises(ValueError, match="package triton, which is not installed"):
        whiten(torch.zeros(1, 9, 4), backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton has an assembler on Linux only")
def test_all_kernels_compile_for_a_gpu_without_spilling():
    """Triton's assembler compiles them for sm_90, because the compiler may refuse what the interpreter accepts."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.numerics.compile_kernels", "90", "whitening:64", "whitening:128"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {kernel["kernel"] for kernel in kernels} == {
        "covariance", "factor", "apply", "symmetric_triangle", "square_product", "gradient"
    }  # fmt: skip
    assert len(kernels) == 2 * 2 * 6
    assert [kernel for kernel in kernels if kernel["spilled"] or kernel["rounds_products"]] == []
    assert max(kernel["shared"] for kernel in kernels) <= 48 * 1024


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_whitening_does_not_synchronize_with_the_device(backend):
    x = rows_of_condition(4, 256, 128, 1e2).float().to(DEVICE).requires_grad_()
    torch.autograd.grad(whiten(x, backend=backend), x, torch.ones_like(x))  # the first call compiles and allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(whiten(x, backend=backend), x, torch.ones_like(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.gpu
def test_cuda_graphs_capture_the_whitening():
    x = rows_of_condition(4, 256, 128, 1e2).float().to(DEVICE).requires_grad_()
    grad_z = random_like(x)

    def both() -> tuple[Tensor, Tensor]:
        z = triton_whiten(x)
        return z, torch.autograd.grad(z, x, grad_z)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        x.copy_(rows_of_condition(4, 256, 128, 1e3, seed=1).float())
    graph.replay()
    for replayed, expected in zip(captured, both(), strict=True):
        assert torch.equal(replayed, expected)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 200])
def test_the_factor_is_deterministic(size):
    """Its programs exchange rows through global memory, where compute-sanitizer does not detect races."""
    x = rows_of_condition(64, 2 * size, size, 1e3).float().to(DEVICE)
    first = whitening_triton.forward(x, 0.1, False)
    for _ in range(200):
        for again, expected in zip(whitening_triton.forward(x, 0.1, False), first, strict=True):
            assert torch.equal(again, expected)


@needs_gpu
@pytest.mark.gpu
def test_errors_are_below_1e_5_at_condition_100():
    x = rows_of_condition(64, 256, 128, 1e2).float().to(DEVICE)
    grad_z = random_like(x)
    exact = value_and_gradient(definition, x.double(), grad_z)
    for actual, truth in zip(value_and_gradient(triton_whiten, x, grad_z), exact, strict=True):
        assert relative_error(actual, truth) < 1e-5
