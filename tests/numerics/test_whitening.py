"""kernels.whitening against the definition, written once more, in other words, and differentiated by autograd.

The backends here run on any machine; test_whitening_triton.py has the third.
"""

import logging
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import whitening
from kernels.backends import fastest_backend
from kernels.precision import full_float32
from kernels.whitening import whiten, whiten_with_status
from tests.numerics.whitening_cases import (
    FAULTS,
    definition,
    random_like,
    relative_error,
    rows_of_condition,
    spoil,
    value_and_gradient,
)

BACKEND_NAMES = ("reference", "torch")
each_backend = pytest.mark.parametrize("backend", BACKEND_NAMES)


@each_backend
@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    size=st.integers(1, 19),
    extra=st.integers(1, 30),
    exponent=st.floats(2, 6),
    scale=st.sampled_from([1e-5, 1.0, 1e5]),
    eps=st.sampled_from([0.0, 1e-4, 0.3]),
    seed=st.integers(0, 1000),
)
def test_float64_value_and_gradient_are_the_definitions(backend, batch, size, extra, exponent, scale, eps, seed):
    x = rows_of_condition(batch, 2 * size + extra, size, 10**exponent, scale, seed) + scale
    grad_z = random_like(x, seed)
    expected, expected_gradient = value_and_gradient(lambda x: definition(x, eps), x, grad_z)
    z, gradient = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x, grad_z)
    assert relative_error(z, expected) < 1e-9
    # Of few rows hardly any gradient is left (none for k=1, M=2): the direct term G W of the backward is the measure then.
    measure = max(expected_gradient.abs().max(), 1 / x.std())
    assert (gradient - expected_gradient).abs().max() < 1e-9 * measure


@each_backend
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_gradcheck(backend, eps):
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda x: whiten(x, eps=eps, backend=backend), x)


@each_backend
def test_one_row_more_than_columns_is_enough(backend):
    x = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert relative_error(whiten(x, backend=backend), definition(x)) < 1e-9


@each_backend
@pytest.mark.parametrize(("num_rows", "size"), [(128, 64), (256, 128), (45, 17)])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_float32_errs_at_most_twice_as_much_as_plain_autograd(backend, num_rows, size, condition):
    """The definition in float32 sets the measure: inverse of the factor, torch's own backward."""
    x = rows_of_condition(8, num_rows, size, condition).float()
    grad_z = random_like(x)
    exact = value_and_gradient(definition, x.double(), grad_z)
    plain = value_and_gradient(definition, x, grad_z)
    ours = value_and_gradient(lambda x: whiten(x, backend=backend), x, grad_z)
    for actual, measure, truth in zip(ours, plain, exact, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - truth).norm() < 2 * (measure - truth).norm()


@each_backend
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_a_float64_factor_rounds_only_the_result(backend, eps):
    """At condition 1e6 float32 keeps two or three digits of z; the inputs are float32 in both."""
    x = rows_of_condition(3, 64, 32, 1e6).float()
    grad_z = random_like(x)
    exact = value_and_gradient(lambda x: definition(x, eps), x.double(), grad_z)
    precise = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend, float64_factor=True), x, grad_z)
    plain = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x, grad_z)
    for actual, single, truth in zip(precise, plain, exact, strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual, truth) < 1e-6
        if eps == 0:
            assert relative_error(actual, truth) < relative_error(single, truth) / 30


@each_backend
def test_a_float64_factor_does_not_take_the_rounding_of_float32_rows_for_signal(backend):
    x = torch.randn(100, 64, 32, generator=torch.Generator().manual_seed(0)) + 100
    dependent, constant = x.clone(), x.clone()
    dependent[:, :, -1] = 1.7 * x[:, :, 0]
    constant[:, :, 3] = 3.7
    for bad in (dependent, constant):
        assert not whiten_with_status(bad, backend=backend, float64_factor=True)[1].ok.any()
    status = whiten_with_status(rows_of_condition(9, 64, 32, 1e8).float(), backend=backend, float64_factor=True)[1]
    assert status.ok.all()
    assert status.min_pivot.dtype == torch.float32


@each_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_whitened_rows_have_zero_mean_and_identity_covariance(backend, dtype):
    x = (rows_of_condition(3, 45, 17, 1e2) + 2).to(dtype)
    z = whiten(x, backend=backend)
    assert z.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    assert z.mean(1).abs().max() < tolerance
    for rows in z:
        assert (torch.cov(rows.T) - torch.eye(17, dtype=z.dtype)).abs().max() < tolerance


@each_backend
def test_shift_and_positive_scale_of_a_column_change_nothing(backend):
    x = rows_of_condition(2, 33, 8, 1e3)
    grad_z = torch.randn_like(x)
    scale, shift = torch.logspace(-5, 5, 8, dtype=torch.float64), torch.linspace(-3, 3, 8, dtype=torch.float64)
    z, gradient = value_and_gradient(lambda x: whiten(x, backend=backend), x, grad_z)
    moved_z, moved_gradient = value_and_gradient(lambda x: whiten(x, backend=backend), (x + shift) * scale, grad_z)
    assert relative_error(moved_z, z) < 1e-9
    assert relative_error(moved_gradient * scale, gradient) < 1e-9


@each_backend
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_status_reports_the_smallest_pivot_relative_to_the_mean_variance(backend, eps):
    x = rows_of_condition(4, 33, 8, 1e3).requires_grad_()
    _, status = whiten_with_status(x, eps=eps, backend=backend)
    for rows, min_pivot in zip(x.detach(), status.min_pivot, strict=True):
        covariance = torch.cov(rows.T)
        mean_variance = covariance.diag().mean()
        shrunk = (1 - eps) * covariance + eps * mean_variance * torch.eye(8, dtype=torch.float64)
        assert min_pivot.item() == pytest.approx((torch.linalg.cholesky(shrunk).diag() ** 2).min() / mean_variance)
    assert status.ok.dtype == torch.bool
    assert status.ok.all()
    assert not status.min_pivot.requires_grad


@each_backend
@pytest.mark.parametrize(("fault", "eps"), FAULTS)
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_bad_slice_harms_no_other(backend, fault, eps, bad):
    x = rows_of_condition(4, 33, 16, 1e2).float()
    grad_z = random_like(x)
    clean = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x, grad_z)
    spoil(x[bad], fault)
    grad_z[bad] = float("nan")  # as from a division by the norm of z = 0
    spoiled = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x, grad_z)
    status = whiten_with_status(x, eps=eps, backend=backend)[1]
    good = [i for i in range(4) if i != bad]
    assert status.ok.tolist() == [i != bad for i in range(4)]
    assert status.min_pivot[bad] == 0
    assert status.min_pivot.isfinite().all()
    for before, after in zip(clean, spoiled, strict=True):
        assert (after[bad] == 0).all()
        torch.testing.assert_close(after[good], before[good], rtol=1e-5, atol=1e-5)


@each_backend
@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_no_dependent_or_constant_column_passes_by_luck(backend, scale):
    """In float32 the last pivot is then noise of either sign: half the factors succeed, the others report it in info."""
    x = scale * torch.randn(100, 64, 32, generator=torch.Generator().manual_seed(0))
    dependent, constant = x.clone(), x.clone()
    dependent[:, :, -1] = 1.7 * x[:, :, 0]
    constant[:, :, 3] = scale * torch.linspace(-10, 10, 100)[:, None]
    assert not whiten_with_status(dependent, backend=backend)[1].ok.any()
    assert not whiten_with_status(constant, backend=backend)[1].ok.any()
    assert whiten_with_status(rows_of_condition(100, 64, 32, 1e6, scale).float(), backend=backend)[1].ok.all()


PRECISIONS = {
    "legacy_high": lambda: torch.set_float32_matmul_precision("high"),
    "legacy_medium": lambda: torch.set_float32_matmul_precision("medium"),
    "legacy_allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "matmul_flag": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "global_flag": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


def matmul_precision() -> str:
    """Of the library that multiplies on the device these tests run on, the CPU."""
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def restored_precision():
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("allow", PRECISIONS.values(), ids=PRECISIONS.keys())
def test_products_are_float32_whatever_is_allowed_and_the_setting_returns(restored_precision, monkeypatch, allow):
    seen = []
    for name in ("bmm", "baddbmm"):  # both run in the forward or the backward of the torch backend
        plain = getattr(torch, name)

        def spy(*arguments, plain=plain, **keywords):
            seen.append(matmul_precision() in ("ieee", "none") and not torch.is_autocast_enabled("cpu"))
            return plain(*arguments, **keywords)

        monkeypatch.setattr(torch, name, spy)
    x = rows_of_condition(2, 33, 8, 1e3).float()
    exact = value_and_gradient(lambda x: whiten(x, backend="torch"), x, x)
    seen.clear()
    allow()
    before = matmul_precision()
    with torch.autocast("cpu", torch.bfloat16):  # the backward runs under it too
        ours = value_and_gradient(lambda x: whiten(x, backend="torch"), x, x)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [True] * 5
    assert matmul_precision() == before
    for actual, expected in zip(ours, exact, strict=True):
        assert torch.equal(actual, expected)


def test_a_setting_that_followed_the_global_one_still_follows_it(restored_precision):
    torch.backends.fp32_precision = "tf32"
    with full_float32(torch.device("cpu")):
        pass
    torch.backends.fp32_precision = "ieee"
    assert matmul_precision() == "ieee"


def test_the_setting_returns_after_an_error(restored_precision):
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError), full_float32(torch.device("cpu")):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "high"


@each_backend
def test_the_forward_ignores_autocast(backend):
    x = rows_of_condition(2, 33, 8, 1e3).float()
    expected = whiten(x, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whiten(x, backend=backend), expected)


@pytest.mark.parametrize("power", [1, 3])
def test_second_derivative_is_refused(power):
    x = rows_of_condition(1, 9, 4, 1e1).requires_grad_()
    loss = whiten(x, backend="torch").pow(power).sum()
    with pytest.raises(NotImplementedError, match=r"'torch' .* no second derivative.* backend='reference'"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_second_derivative_of_the_reference():
    x = rows_of_condition(1, 5, 2, 1e1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: whiten(x, backend="reference"), x)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(compiler):
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    x = rows_of_condition(3, 33, 8, 1e2).float()
    x[1, 0, 0] = float("nan")
    eager = value_and_gradient(lambda x: whiten(2 * x), x, x.nan_to_num())
    compiled = torch.compile(lambda x: whiten(2 * x), fullgraph=True, backend=compiler)
    for actual, expected in zip(value_and_gradient(compiled, x, x.nan_to_num()), eager, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("x", "keywords", "message"),
    [
        (torch.zeros(8, 4), {}, "slices, rows, columns"),
        (torch.zeros(1, 8, 4, dtype=torch.int64), {}, "floating"),
        (torch.zeros(1, 4, 4), {}, "singular"),
        (torch.zeros(1, 8, 4), {"eps": 1.0}, r"\[0, 1\)"),
        (torch.zeros(1, 8, 4), {"eps": -0.1}, r"\[0, 1\)"),
        (torch.zeros(1, 8, 4), {"backend": "cuda"}, "available: auto, reference, torch, triton"),
    ],
)
def test_bad_arguments_are_named(x, keywords, message):
    with pytest.raises(ValueError, match=message):
        whiten(x, **keywords)


def test_auto_says_once_a_size_what_it_took(caplog):
    whitening._chosen.cache_clear()
    with caplog.at_level(logging.INFO, logger="kernels.whitening"):
        for batch in (1, 1, 2, 2):
            whiten(torch.randn(batch, 8, 4))
    taken = [fastest_backend("cpu", batch, 8, 4, False) for batch in (1, 2)]
    assert [record.message for record in caplog.records] == [
        f"whitening: backend 'auto' takes '{taken[0]}' for 1 slices of 8 x 4 on cpu",
        f"whitening: backend 'auto' takes '{taken[1]}' for 2 slices of 8 x 4 on cpu",
    ]
