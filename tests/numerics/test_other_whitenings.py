"""ZCA whitening and standardising equal definitions in float64, whose gradients autograd computes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import whitening_zca
from kernels.whitening import whiten, whiten_with_status
from tests.numerics.whitening_cases import (
    FAULTS,
    random_like,
    relative_error,
    rows_of_condition,
    shrunk_covariance,
    spoil,
    value_and_gradient,
)

each_whitening = pytest.mark.parametrize("whitening", ["zca", "standardise"])
each_backend = pytest.mark.parametrize("backend", ["reference", "torch"])


def definition(x: Tensor, whitening: str, eps: float = 0.0) -> Tensor:
    """Apply the inverse root of each covariance, from its singular values, or divide by the standard deviations."""
    centred = x - x.mean(1, keepdim=True)
    a = shrunk_covariance(x, eps)
    if whitening == "standardise":
        return centred / a.diagonal(dim1=1, dim2=2).sqrt()[:, None]
    eigenvalues, vectors = torch.linalg.eigh(a)
    return centred @ vectors @ torch.diag_embed(eigenvalues**-0.5) @ vectors.mT


def closed_gradient(x: Tensor, grad_z: Tensor) -> Tensor:
    """Return the gradient of the ZCA whitening at x in the eigenbasis, where equal eigenvalues do no harm."""
    centred = x - x.mean(1, keepdim=True)
    eigenvalues, vectors = torch.linalg.eigh(shrunk_covariance(x, 0.0))
    roots = eigenvalues.sqrt()
    w = vectors @ torch.diag_embed(1 / roots) @ vectors.mT
    # dW = -W P(dA) W, where R P + P R = dA for the root R
    direct = centred.mT @ grad_z
    inner = vectors.mT @ (w @ (direct + direct.mT) @ w) @ vectors / 2
    at_covariance = -vectors @ (inner / (roots[:, :, None] + roots[:, None, :])) @ vectors.mT
    gradient = grad_z @ w + 2 / (x.shape[1] - 1) * centred @ at_covariance
    return gradient - gradient.mean(1, keepdim=True)


@each_backend
@each_whitening
@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4),
    size=st.integers(1, 19),
    extra=st.integers(1, 30),
    exponent=st.floats(2, 6),
    scale=st.sampled_from([1e-5, 1.0, 1e5]),
    eps=st.sampled_from([0.0, 1e-4, 0.3]),
    seed=st.integers(0, 1000),
)
def test_float64_value_and_gradient_equal_the_definition(
    whitening, backend, batch, size, extra, exponent, scale, eps, seed
):
    x = rows_of_condition(batch, 2 * size + extra, size, 10**exponent, scale, seed) + scale
    grad_z = random_like(x, seed)
    expected, expected_gradient = value_and_gradient(lambda x: definition(x, whitening, eps), x, grad_z)
    ours = value_and_gradient(lambda x: whiten(x, whitening=whitening, eps=eps, backend=backend), x, grad_z)
    assert relative_error(ours[0], expected) < 1e-9
    measure = max(expected_gradient.abs().max(), 1 / x.std())
    assert (ours[1] - expected_gradient).abs().max() < 1e-8 * measure


@pytest.mark.parametrize(("num_rows", "size"), [(2, 1), (9, 4), (46, 45), (128, 64), (141, 67)])
def test_well_conditioned_slices_are_exact_in_float64(num_rows, size):
    """The condition of M = k + 1 random rows is high, so those rows are shrunk."""
    x = rows_of_condition(3, num_rows, size, 10.0)
    eps = 0.01 if num_rows == size + 1 else 0.0
    z, status = whiten_with_status(x, whitening="zca", eps=eps)
    assert status.ok.all()
    assert relative_error(z, definition(x, "zca", eps)) < 1e-11


@each_whitening
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_the_gradient_passes_gradcheck(whitening, eps):
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda x: whiten(x, whitening=whitening, eps=eps), x)


def test_white_rows_stay_and_their_gradient_is_finite():
    """All eigenvalues are 1, so a gradient that divides by their differences would not be finite."""
    white = whiten(rows_of_condition(3, 33, 8, 1e3), whitening="cholesky")
    grad_z = random_like(white)
    z, gradient = value_and_gradient(lambda x: whiten(x, whitening="zca"), white, grad_z)
    assert relative_error(z, white) < 1e-12
    assert relative_error(gradient, closed_gradient(white, grad_z)) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_whitened_rows_have_identity_covariance_and_the_matrix_is_symmetric(dtype):
    x = (rows_of_condition(3, 45, 17, 1e2) + 2).to(dtype)
    z, status = whiten_with_status(x, whitening="zca")
    assert status.ok.all()
    assert z.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for rows, whitened in zip(x.to(z.dtype), z, strict=True):
        assert (torch.cov(whitened.T) - torch.eye(17, dtype=z.dtype)).abs().max() < tolerance
        w = torch.linalg.lstsq(rows - rows.mean(0), whitened).solution
        assert (w - w.T).abs().max() < tolerance * w.abs().max()


def test_zca_commutes_with_rotations():
    x = rows_of_condition(3, 33, 8, 1e3)
    rotation = torch.linalg.qr(random_like(x[0, :8])).Q
    grad_z = random_like(x)
    z, gradient = value_and_gradient(lambda x: whiten(x, whitening="zca"), x, grad_z)
    turned = value_and_gradient(lambda x: whiten(x, whitening="zca"), x @ rotation, grad_z @ rotation)
    assert relative_error(turned[0], z @ rotation) < 1e-10
    assert relative_error(turned[1], gradient @ rotation) < 1e-9
    cholesky = whiten(x @ rotation, whitening="cholesky")
    assert relative_error(cholesky, whiten(x, whitening="cholesky") @ rotation) > 0.1


def test_all_whitenings_are_equal_in_one_dimension():
    x = rows_of_condition(3, 9, 1, 1e2)
    grad_z = random_like(x)
    expected = value_and_gradient(whiten, x, grad_z)
    for whitening in ("zca", "standardise"):
        for ours, right in zip(
            value_and_gradient(lambda x, w=whitening: whiten(x, whitening=w), x, grad_z), expected, strict=True
        ):
            assert relative_error(ours, right) < 1e-12


def test_standardised_columns_have_variance_1_with_fewer_rows_than_columns():
    x = rows_of_condition(3, 4, 9, 1e2)
    z = whiten(x, whitening="standardise")
    assert (z.var(1) - 1).abs().max() < 1e-12
    assert z.mean(1).abs().max() < 1e-12


@pytest.mark.parametrize(("num_rows", "size"), [(128, 64), (256, 128), (45, 17)])
@pytest.mark.parametrize(("condition", "value_bound", "gradient_bound"), [
    (1e0, 3e-6, 2e-5), (1e2, 1e-5, 4e-5), (1e4, 3e-4, 1e-3), (1e5, 2e-3, 1e-2),
])  # fmt: skip
def test_float32_errors_are_bounded(num_rows, size, condition, value_bound, gradient_bound):
    """The bounds are three times the errors that kernels/README.md lists."""
    x = rows_of_condition(8, num_rows, size, condition).float()
    grad_z = random_like(x)
    z, gradient = value_and_gradient(lambda x: whiten(x, whitening="zca"), x, grad_z)
    exact = definition(x.double(), "zca")
    exact_gradient = closed_gradient(x.double(), grad_z.double())
    assert whiten_with_status(x, whitening="zca")[1].ok.all()
    assert (z - exact).norm() < value_bound * exact.norm()
    assert (gradient - exact_gradient).norm() < gradient_bound * exact_gradient.norm()


@each_backend
def test_a_float32_slice_is_whitened_up_to_a_condition_of_1e5_and_refused_above_1e7(backend):
    """Between the two, it depends on how the eigenvalues are distributed."""
    for condition, expected in ((1e4, True), (1e7, False)):
        ok = whiten_with_status(rows_of_condition(20, 128, 64, condition).float(), whitening="zca", backend=backend)[
            1
        ].ok
        assert (ok == expected).all()
    flat = torch.ones(64, dtype=torch.float64)
    for smallest, expected in ((1e-5, True), (1e-8, False)):
        flat[-1] = smallest
        white = whiten(rows_of_condition(20, 128, 64, 1e1))
        x = white * flat.sqrt() @ torch.linalg.qr(random_like(flat.diag())).Q
        ok = whiten_with_status(x.float(), whitening="zca", backend=backend)[1].ok
        assert (ok == expected).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_steps_bring_every_resolvable_root_to_one(dtype):
    resolution = 16 * torch.finfo(dtype).eps
    roots = torch.logspace(0.5 * math.log10(resolution), 0, 10_001, dtype=torch.float64)
    for scale in whitening_zca._scales(dtype):
        roots = scale * roots * (3 - (scale * roots) ** 2) / 2
    assert (roots - 1).abs().max() < 2 * torch.finfo(dtype).eps
    assert len(whitening_zca._scales(dtype)) == {torch.float32: 11, torch.float64: 22}[dtype]


@each_backend
@each_whitening
@pytest.mark.parametrize(("fault", "eps"), FAULTS)
@pytest.mark.parametrize("bad", [0, 3])
def test_a_slice_that_fails_does_not_change_the_others(whitening, backend, fault, eps, bad):
    def function(x: Tensor) -> Tensor:
        return whiten(x, whitening=whitening, eps=eps, backend=backend)

    if whitening == "standardise" and fault == "dependent":
        pytest.skip("standardising accepts dependent columns")
    x = rows_of_condition(4, 33, 16, 1e2).float()
    grad_z = random_like(x)
    clean = value_and_gradient(function, x, grad_z)
    spoil(x[bad], fault)
    grad_z[bad] = float("nan")  # as a division by the norm of z = 0 gives
    spoiled = value_and_gradient(function, x, grad_z)
    status = whiten_with_status(x, whitening=whitening, eps=eps, backend=backend)[1]
    good = [i for i in range(4) if i != bad]
    assert status.ok.tolist() == [i != bad for i in range(4)]
    assert status.min_pivot[bad] == 0
    assert status.min_pivot.isfinite().all()
    for before, after in zip(clean, spoiled, strict=True):
        assert (after[bad] == 0).all()
        torch.testing.assert_close(after[good], before[good], rtol=1e-5, atol=1e-5)


@each_backend
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e5, 1e15])
def test_every_slice_with_a_dependent_or_constant_column_is_refused(backend, scale):
    x = scale * torch.randn(60, 64, 32, generator=torch.Generator().manual_seed(0))
    dependent, constant = x.clone(), x.clone()
    dependent[:, :, -1] = 1.7 * x[:, :, 0]
    constant[:, :, 3] = scale * torch.linspace(-10, 10, 60)[:, None]
    for whitening, bad in (("zca", dependent), ("zca", constant), ("standardise", constant)):
        assert not whiten_with_status(bad, whitening=whitening, backend=backend)[1].ok.any()
    assert whiten_with_status(dependent, whitening="standardise", backend=backend)[1].ok.all()
    for whitening in ("zca", "standardise"):
        assert whiten_with_status(x, whitening=whitening, backend=backend)[1].ok.all()


@each_backend
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_the_smallest_pivot_is_the_smallest_conditional_variance(backend, eps):
    """zca: variance of a column, given all others. standardise: variance of the column. Both relative to the mean variance."""
    x = rows_of_condition(4, 33, 8, 1e3)
    a = shrunk_covariance(x, eps)
    variances = a.diagonal(dim1=1, dim2=2)
    given_others = torch.linalg.inv(a).diagonal(dim1=1, dim2=2).reciprocal()
    for whitening, pivots in (("zca", given_others), ("standardise", variances)):
        status = whiten_with_status(x, whitening=whitening, eps=eps, backend=backend)[1]
        torch.testing.assert_close(status.min_pivot, pivots.amin(1) / variances.mean(1))


@each_whitening
def test_slices_are_independent_and_the_order_of_rows_does_not_matter(whitening):
    x = rows_of_condition(5, 33, 8, 1e3)
    grad_z = random_like(x)
    expected = value_and_gradient(lambda x: whiten(x, whitening=whitening), x, grad_z)
    slices, rows = torch.tensor([3, 0, 4, 2, 1]), torch.randperm(33, generator=torch.Generator().manual_seed(0))
    for part in ((slices,), (slice(None), rows), (slice(1, 2),)):
        ours = value_and_gradient(lambda x: whiten(x, whitening=whitening), x[part], grad_z[part])
        for actual, whole in zip(ours, expected, strict=True):
            assert relative_error(actual, whole[part]) < 1e-9


@each_whitening
def test_the_operator_declares_its_output_shapes_and_dtypes(whitening):
    for eps in (0.0, 0.1):
        x = rows_of_condition(2, 9, 4, 1e1)
        arguments = (x, eps, False, whitening)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.wmse.whiten, arguments, test_utils=checks)
        z, w, u, ok, _ = torch.ops.wmse.whiten(*arguments)
        backward = (random_like(x), z, w, u, ok, eps, whitening)
        torch.library.opcheck(torch.ops.wmse.whiten_backward, backward, test_utils=checks)


@each_whitening
def test_the_whitening_compiles_as_one_graph_and_reads_no_value(whitening):
    x = rows_of_condition(3, 33, 8, 1e2).float()
    eager = value_and_gradient(lambda x: whiten(2 * x, whitening=whitening), x, x)
    compiled = torch.compile(lambda x: whiten(2 * x, whitening=whitening), fullgraph=True, backend="aot_eager")
    for actual, expected in zip(value_and_gradient(compiled, x, x), eager, strict=True):
        torch.testing.assert_close(actual, expected)
    nowhere = torch.ones(2, 9, 4, device="meta", requires_grad=True)
    z = whiten(nowhere, whitening=whitening)
    assert torch.autograd.grad(z, nowhere, z.detach())[0].device.type == "meta"


@pytest.mark.parametrize(
    ("x", "keywords", "message"),
    [
        (torch.zeros(1, 8, 4), {"whitening": "pca"}, "available: cholesky, zca, standardise"),
        (torch.zeros(1, 4, 4), {"whitening": "zca"}, "singular"),
        (torch.zeros(1, 1, 4), {"whitening": "standardise"}, "2 rows"),
        (torch.zeros(1, 8, 4), {"whitening": "zca", "backend": "triton"}, "'zca' has the backends auto, torch and ref"),
        (torch.zeros(1, 8, 4), {"whitening": "standardise", "cholesky_float64": True}, "without cholesky_float64"),
    ],
)
def test_invalid_arguments_are_refused(x, keywords, message):
    with pytest.raises(ValueError, match=message):
        whiten(x, **keywords)
