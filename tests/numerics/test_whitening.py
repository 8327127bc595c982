"""kernels.whitening equals a second, independent definition, whose gradient autograd computes.

These backends run on any machine; test_whitening_triton.py tests the third one.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.whitening import whiten, whiten_with_status
from tests.numerics.whitening_cases import (
    FAULTS,
    assert_as_good_as_plain_float32,
    correlation_eigenvalues,
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
def test_float64_value_and_gradient_equal_the_definition(backend, batch, size, extra, exponent, scale, eps, seed):
    x = rows_of_condition(batch, 2 * size + extra, size, 10**exponent, scale, seed) + scale
    grad_z = random_like(x, seed)
    expected, expected_gradient = value_and_gradient(lambda x: definition(x, eps), x, grad_z)
    z, gradient = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x, grad_z)
    assert relative_error(z, expected) < 1e-9
    # With few rows the gradient nearly cancels (it is 0 for k=1, M=2), so it is measured against the term G W of the backward.
    measure = max(expected_gradient.abs().max(), 1 / x.std())
    assert (gradient - expected_gradient).abs().max() < 1e-9 * measure


@each_backend
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_the_gradient_passes_gradcheck(backend, eps):
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda x: whiten(x, eps=eps, backend=backend), x)


@each_backend
def test_one_row_more_than_columns_is_enough(backend):
    x = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert relative_error(whiten(x, backend=backend), definition(x)) < 1e-9


@each_backend
@pytest.mark.parametrize(("num_rows", "size"), [(128, 64), (256, 128), (45, 17)])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_float32_errors_are_at_most_twice_those_of_plain_autograd(backend, num_rows, size, condition):
    x = rows_of_condition(8, num_rows, size, condition)
    assert_as_good_as_plain_float32(lambda x, eps: whiten(x, eps=eps, backend=backend), x)


random_float32_case = {
    "batch": st.integers(1, 4),
    "size": st.integers(1, 40),
    "exponent": st.floats(2, 6),
    "scale": st.floats(-5, 5).map(lambda exponent: 10**exponent),
    "shift": st.sampled_from([0, 1, -3, 10]),
    "eps": st.sampled_from([0.0, 0.0, 1e-4, 0.3]),
    "seed": st.integers(0, 1000),
}


@each_backend
@settings(max_examples=60, deadline=None)
@given(**random_float32_case, extra=st.one_of(st.integers(8, 60), st.integers(1, 7)))
def test_float32_errors_are_bounded_at_random_sizes(backend, batch, size, extra, exponent, scale, shift, eps, seed):
    """No well-conditioned slice is refused, and errors are bounded while the condition leaves a digit.

    The probability that the smallest eigenvalue of a covariance of M rows falls below t is proportional to t^((M-k)/2). With
    one to seven rows more than columns a sample's condition may therefore be far above its population's (1e10 instead of 1e6
    was seen), and float32 loses all digits. Of 2,690 slices that were refused, none had a correlation whose smallest
    eigenvalue was above 10 machine epsilons.
    """
    x = (rows_of_condition(batch, size + extra, size, 10**exponent, scale, seed) + shift * scale).float()
    ok = whiten_with_status(x, eps=eps, backend=backend)[1].ok
    eigenvalues = correlation_eigenvalues(x.double(), eps)
    assert ok[eigenvalues[:, 0] > 50 * torch.finfo(torch.float32).eps].all()
    ok &= eigenvalues[:, -1] < (1e6 if extra < 8 else math.inf) * eigenvalues[:, 0]
    if ok.any():
        assert_as_good_as_plain_float32(
            lambda x, eps: whiten(x, eps=eps, backend=backend), x[ok], eps, seed=seed, drawn=True
        )


@each_backend
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_a_float64_factor_rounds_only_the_result(backend, eps):
    """At condition 1e6 a float32 factor leaves two or three digits of z. The inputs are float32 in both cases."""
    x = rows_of_condition(3, 64, 32, 1e6).float()
    grad_z = random_like(x)
    exact = value_and_gradient(lambda x: definition(x, eps), x.double(), grad_z)
    precise = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend, cholesky_float64=True), x, grad_z)
    plain = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x, grad_z)
    for actual, single, truth in zip(precise, plain, exact, strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual, truth) < 1e-6
        if eps == 0:
            assert relative_error(actual, truth) < relative_error(single, truth) / 30


@each_backend
def test_a_float64_factor_whitens_what_float32_refuses(backend):
    x = rows_of_condition(3, 64, 32, 1e10).float()
    assert not whiten_with_status(x, backend=backend)[1].ok.any()
    assert whiten_with_status(x, backend=backend, cholesky_float64=True)[1].ok.all()


@each_backend
def test_a_float64_factor_refuses_columns_that_depend_up_to_float32_rounding(backend):
    x = torch.randn(100, 64, 32, generator=torch.Generator().manual_seed(0)) + 100
    dependent, constant = x.clone(), x.clone()
    dependent[:, :, -1] = 1.7 * x[:, :, 0]
    constant[:, :, 3] = 3.7
    for bad in (dependent, constant):
        assert not whiten_with_status(bad, backend=backend, cholesky_float64=True)[1].ok.any()
    status = whiten_with_status(rows_of_condition(9, 64, 32, 1e8).float(), backend=backend, cholesky_float64=True)[1]
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
@given(batch=st.integers(1, 3), size=st.integers(1, 12), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_whitening_is_invariant_to_shift_and_positive_scale_of_a_column(backend, batch, size, seed):
    x = rows_of_condition(batch, 2 * size + 3, size, 1e3, seed=seed)
    grad_z = random_like(x, seed)
    scale = 10 ** (10 * random_like(x[0, 0], seed).sigmoid() - 5)
    shift = 3 * random_like(x[0, 0], seed + 1)
    z, gradient = value_and_gradient(lambda x: whiten(x, backend=backend), x, grad_z)
    moved_z, moved_gradient = value_and_gradient(lambda x: whiten(x, backend=backend), (x + shift) * scale, grad_z)
    assert relative_error(moved_z, z) < 1e-9
    assert relative_error(moved_gradient * scale, gradient) < 1e-8


@each_backend
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_slices_are_independent_and_the_order_of_rows_does_not_matter(backend, eps):
    x = rows_of_condition(5, 33, 8, 1e3)
    grad_z = random_like(x)
    expected = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x, grad_z)
    slices, rows = torch.tensor([3, 0, 4, 2, 1]), torch.randperm(33, generator=torch.Generator().manual_seed(0))
    for part in ((slices,), (slice(None), rows), (slice(1, 2),)):
        ours = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x[part], grad_z[part])
        for actual, whole in zip(ours, expected, strict=True):
            assert relative_error(actual, whole[part]) < 1e-9


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
def test_a_slice_that_fails_does_not_change_the_others(backend, fault, eps, bad):
    x = rows_of_condition(4, 33, 16, 1e2).float()
    grad_z = random_like(x)
    clean = value_and_gradient(lambda x: whiten(x, eps=eps, backend=backend), x, grad_z)
    spoil(x[bad], fault)
    grad_z[bad] = float("nan")  # as a division by the norm of z = 0 gives
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
@pytest.mark.parametrize(("batch", "size"), [(100, 32), (20, 80)], ids=["factored_whole", "factored_in_halves"])
def test_every_slice_with_a_dependent_or_constant_column_is_refused(backend, scale, batch, size):
    """In float32 the last pivot is noise of either sign, so that half of the Cholesky factors succeed by chance."""
    x = scale * torch.randn(batch, 2 * size, size, generator=torch.Generator().manual_seed(0))
    dependent, constant = x.clone(), x.clone()
    dependent[:, :, -1] = 1.7 * x[:, :, 0]
    constant[:, :, 3] = scale * torch.linspace(-10, 10, batch)[:, None]
    assert not whiten_with_status(dependent, backend=backend)[1].ok.any()
    assert not whiten_with_status(constant, backend=backend)[1].ok.any()
    sound = rows_of_condition(batch, 2 * size, size, 1e6, scale).float()
    assert whiten_with_status(sound, backend=backend)[1].ok.all()


@each_backend
def test_columns_a_hundred_thousand_deviations_from_zero_are_whitened(backend):
    """Their rounding error is a hundredth of their standard deviation."""
    x = torch.randn(4, 200, 8, generator=torch.Generator().manual_seed(0)) + 1e5
    assert whiten_with_status(x, backend=backend)[1].ok.all()


@each_backend
def test_the_forward_pass_ignores_autocast(backend):
    x = rows_of_condition(2, 33, 8, 1e3).float()
    expected = whiten(x, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whiten(x, backend=backend), expected)


@pytest.mark.parametrize(
    ("x", "keywords", "message"),
    [
        (torch.zeros(8, 4), {}, "slices, rows, columns"),
        (torch.zeros(1, 8, 4, dtype=torch.int64), {}, "floating"),
        (torch.zeros(0, 8, 4), {}, "one slice and one column"),
        (torch.zeros(1, 8, 0), {}, "one slice and one column"),
        (torch.zeros(1, 4, 4), {}, "singular"),
        (torch.zeros(1, 8, 4), {"eps": 1.0}, r"\[0, 1\)"),
        (torch.zeros(1, 8, 4), {"eps": -0.1}, r"\[0, 1\)"),
        (torch.zeros(1, 8, 4), {"backend": "cuda"}, "available: auto, reference, torch, triton"),
    ],
)
def test_invalid_arguments_are_refused(x, keywords, message):
    with pytest.raises(ValueError, match=message):
        whiten(x, **keywords)
