"""trainer.losses.wmse equals a loop over iterations, slices and pairs of views, written from the paper."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.numerics.test_contrastive import V
from tests.numerics.whitening_cases import rows_of_condition
from trainer.errors import InputError
from trainer.losses import wmse
from trainer.losses.wmse import wmse_loss, wmse_loss_with_status


def definition(
    v: Tensor,
    num_views: int,
    slice_size: int,
    permutations: Tensor,
    normalize: bool,
    failed: set[tuple[int, int]] = frozenset(),
    whitening: str = "cholesky",
) -> Tensor:
    """Return the mean distance over all pairs of views, images, slices and iterations, without the failed slices.

    failed: pairs (iteration, slice).
    """
    num_images = len(v) // num_views
    distances = []
    for iteration, permutation in enumerate(permutations):
        for start in range(0, num_images, slice_size):
            if (iteration, start // slice_size) in failed:
                continue
            images = permutation[start : start + slice_size]
            whitened = [whiten_slice(v[view * num_images + images], whitening) for view in range(num_views)]
            for i in range(num_views):
                for j in range(i):
                    if normalize:
                        distances.append(2 - 2 * torch.cosine_similarity(whitened[i], whitened[j], dim=1))
                    else:
                        distances.append((whitened[i] - whitened[j]).square().mean(1))
    return torch.cat(distances).mean()


def whiten_slice(rows: Tensor, whitening: str) -> Tensor:
    centred = rows - rows.mean(0)
    if whitening == "standardise":
        return centred / rows.std(0)
    covariance = torch.cov(rows.T)
    if whitening == "zca":
        eigenvalues, vectors = torch.linalg.eigh(covariance)
        return centred @ vectors @ torch.diag(eigenvalues.rsqrt()) @ vectors.T
    return centred @ torch.linalg.inv(torch.linalg.cholesky(covariance)).T


def embeddings(num_views: int, num_images: int, size: int, seed: int = 0, noise: float = 0.5) -> Tensor:
    """Return view-major float64 embeddings, similar for the views of one image."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(num_images, size, dtype=torch.float64, generator=generator)
    view = torch.randn(num_views, num_images, size, dtype=torch.float64, generator=generator)
    return (image + noise * view).flatten(0, 1) * torch.logspace(-1, 1, size, dtype=torch.float64)


def permutations_of(iterations: int, num_images: int, seed: int = 0) -> Tensor:
    return wmse.draw_permutations(iterations, num_images, torch.device("cpu"), torch.Generator().manual_seed(seed))


def loss_and_gradient(function, v: Tensor) -> tuple[Tensor, Tensor]:
    v = v.detach().clone().requires_grad_()
    loss = function(v)
    return loss.detach(), torch.autograd.grad(loss, v)[0]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("num_views", [2, 3, 4])
@pytest.mark.parametrize("whitening", ["cholesky", "zca", "standardise"])
def test_value_and_gradient_equal_the_definition(whitening, num_views, iterations, normalize, backend):
    v, permutations = embeddings(num_views, 33, 5), permutations_of(iterations, 33)
    expected = loss_and_gradient(
        lambda v: definition(v, num_views, 11, permutations, normalize, whitening=whitening), v
    )
    sizes = {"num_views": num_views, "slice_size": 11, "iterations": iterations, "permutations": permutations}
    options = {"normalize": normalize, "backend": backend, "whitening": whitening}
    ours = loss_and_gradient(lambda v: wmse_loss(v, **sizes, **options), v)
    for actual, right in zip(ours, expected, strict=True):
        assert (actual - right).abs().max() < 1e-9 * right.abs().max()
    per_view = ours[1].view(num_views, -1).abs().amax(1)
    assert (per_view > 0.1 * per_view.max()).all()  # no view is detached


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    ("num_views", "options", "value"),
    [
        (2, {"slice_size": 8}, 1.759701399460),
        (4, {"slice_size": 8}, 1.654635431697),
        (2, {"slice_size": 8, "normalize": False}, 1.505735649607),
        (4, {"slice_size": 8, "normalize": False}, 1.438335530658),
        (2, {"slice_size": 8, "whitening": "standardise"}, 1.796059794461),
        (2, {"slice_size": 16, "whitening": "standardise"}, 1.838033672897),
    ],
)
def test_the_loss_has_fixed_values(num_views, options, value, backend):
    """Those of "cholesky" are the values of the W-MSE authors' published code."""
    identity = torch.arange(16)[None]
    loss = wmse_loss(V[: 16 * num_views], num_views=num_views, permutations=identity, backend=backend, **options)
    assert loss.item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("whitening", ["zca", "standardise"])
def test_in_one_dimension_all_whitenings_are_equal(whitening):
    v, sizes = embeddings(3, 24, 1), {"num_views": 3, "slice_size": 8, "permutations": permutations_of(2, 24)}
    sizes |= {"iterations": 2, "normalize": False}
    expected = loss_and_gradient(lambda v: wmse_loss(v, **sizes), v)
    for actual, right in zip(
        loss_and_gradient(lambda v: wmse_loss(v, **sizes, whitening=whitening), v), expected, strict=True
    ):
        torch.testing.assert_close(actual, right, rtol=1e-11, atol=1e-12)


def test_equal_columns_have_loss_0_when_they_are_standardised_and_cannot_be_whitened():
    """Rows of equal signs in both views then agree: the collapse that the paper describes for BatchNorm."""
    column = embeddings(1, 16, 1)
    same = torch.cat([column, 3 * column + 1]).expand(-1, 4).contiguous()
    loss, status = wmse_loss_with_status(same, num_views=2, slice_size=8, whitening="standardise")
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert status.ok.all()
    for whitening in ("cholesky", "zca"):
        status = wmse_loss_with_status(same.float(), num_views=2, slice_size=8, whitening=whitening)[1]
        assert not status.ok.any()


@settings(max_examples=40, deadline=None)
@given(
    num_views=st.integers(2, 5),
    size=st.integers(1, 9),
    slices=st.integers(1, 3),
    noise=st.floats(0, 1e3),
    seed=st.integers(0, 99),
)
def test_the_loss_is_between_0_and_4(num_views, size, slices, noise, seed):
    v = embeddings(num_views, slices * 2 * size, size, seed, noise).float()
    loss, status = wmse_loss_with_status(v, num_views=num_views, slice_size=2 * size)
    assert 0 <= loss <= 4 * (1 + 1e-6)
    if noise == 0:
        assert loss < 1e-9
    assert status.ok.shape == (num_views * slices,)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("normalize", [True, False])
def test_float32_errors_are_bounded(normalize, backend):
    """The scales of the columns do not matter, so the relevant condition is that of 32 white rows in 16 dimensions: 30."""
    v, permutations = embeddings(3, 64, 16).float(), permutations_of(2, 64)
    sizes = {"num_views": 3, "slice_size": 32, "iterations": 2, "permutations": permutations, "normalize": normalize}
    loss, gradient = loss_and_gradient(lambda v: wmse_loss(v, **sizes, backend=backend), v)
    exact, exact_gradient = loss_and_gradient(lambda v: definition(v, 3, 32, permutations, normalize), v.double())
    _, plain_gradient = loss_and_gradient(lambda v: definition(v, 3, 32, permutations, normalize), v)
    assert loss.dtype == gradient.dtype == torch.float32
    assert (gradient - exact_gradient).norm() < 2 * (plain_gradient - exact_gradient).norm()
    assert loss.item() == pytest.approx(exact.item(), rel=4e-6)  # 2 * UNIT * condition


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_float64_factor_reaches_the_whitening(backend):
    v = (rows_of_condition(1, 128, 16, 1e6)[0] + 1).float()
    sizes = {"num_views": 2, "slice_size": 32, "permutations": permutations_of(1, 64), "backend": backend}
    exact = loss_and_gradient(lambda v: definition(v, 2, 32, sizes["permutations"], normalize=True), v.double())
    plain = loss_and_gradient(lambda v: wmse_loss(v, **sizes), v)
    precise = loss_and_gradient(lambda v: wmse_loss(v, **sizes, cholesky_float64=True), v)
    for actual, single, truth in zip(precise, plain, exact, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - truth).norm() < 1e-6 * truth.norm()
        assert (actual - truth).norm() < (single - truth).norm() / 30


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_order_of_images_and_views_does_not_matter(normalize, backend):
    """Views and images are in another order, and the permutations undo the order of the images."""
    v, permutations = embeddings(3, 24, 4), permutations_of(2, 24)
    sizes = {"num_views": 3, "slice_size": 12, "iterations": 2, "normalize": normalize, "backend": backend}
    loss, gradient = loss_and_gradient(lambda v: wmse_loss(v, **sizes, permutations=permutations), v)
    images, views = permutations_of(1, 24, seed=9)[0], [2, 0, 1]
    moved = v.view(3, 24, 4)[views][:, images].flatten(0, 1)
    undone = images.argsort()[permutations]
    moved_loss, moved_gradient = loss_and_gradient(lambda v: wmse_loss(v, **sizes, permutations=undone), moved)
    assert moved_loss.item() == pytest.approx(loss.item(), rel=1e-10)
    expected = gradient.view(3, 24, 4)[views][:, images].flatten(0, 1)
    assert (moved_gradient - expected).abs().max() < 1e-9 * gradient.abs().max()


def test_opposite_views_have_loss_4_and_unrelated_ones_2():
    v = embeddings(1, 512, 8)
    assert wmse_loss(torch.cat([v, -v]), num_views=2, slice_size=128).item() == pytest.approx(4)
    unrelated = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    assert wmse_loss(unrelated, num_views=2, slice_size=128).item() == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("whitening", ["cholesky", "standardise"])
def test_the_loss_is_invariant_to_shift_and_positive_scale_of_a_dimension(whitening):
    v = embeddings(3, 24, 4)
    scale = torch.logspace(-5, 5, 4, dtype=torch.float64)
    sizes = {"num_views": 3, "slice_size": 12, "permutations": permutations_of(1, 24), "whitening": whitening}
    loss, gradient = loss_and_gradient(lambda v: wmse_loss(v, **sizes), v)
    moved_loss, moved_gradient = loss_and_gradient(lambda v: wmse_loss(v, **sizes), (v + 3) * scale)
    assert moved_loss.item() == pytest.approx(loss.item(), rel=1e-10)
    assert (moved_gradient * scale - gradient).abs().max() < 1e-9 * gradient.abs().max()


def test_without_permutations_one_is_drawn_for_each_iteration():
    v = embeddings(2, 64, 4)

    def loss(**keywords):
        return wmse_loss(v, num_views=2, slice_size=8, iterations=2, **keywords)

    drawn = permutations_of(2, 64, seed=5)
    assert (drawn.sort(1).values == torch.arange(64)).all()
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(loss(generator=torch.Generator().manual_seed(5)), loss(permutations=drawn))
    assert not torch.equal(loss(generator=torch.Generator().manual_seed(6)), loss(permutations=drawn))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("whitening", ["cholesky", "zca", "standardise"])
def test_a_failed_slice_does_not_count_in_the_mean(whitening, normalize, backend):
    v, permutations = embeddings(3, 24, 4), permutations_of(2, 24)
    v[24 + permutations[0, 9]] = float("nan")  # view 1, slice 1 of iteration 0
    bad = {(0, 1), (1, int((permutations[1] == permutations[0, 9]).nonzero()) // 8)}
    sizes = {"num_views": 3, "slice_size": 8, "iterations": 2, "permutations": permutations, "normalize": normalize}
    sizes |= {"backend": backend, "whitening": whitening}
    loss, gradient = loss_and_gradient(lambda v: wmse_loss(v, **sizes), v)
    expected, expected_gradient = loss_and_gradient(
        lambda v: definition(v, 3, 8, permutations, normalize, failed=bad, whitening=whitening), v.nan_to_num()
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    assert (gradient - expected_gradient).abs().max() < 1e-9
    ok = wmse_loss_with_status(v, **sizes)[1].ok.view(3, 2, 3).transpose(0, 1)  # iteration, view, slice
    assert {(i, s) for i, view, s in (~ok).nonzero().tolist() if view == 1} == bad
    assert ok[:, [0, 2]].all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_loss_and_gradient_are_0_if_all_slices_fail(backend):
    v = torch.ones(16, 3)
    loss, gradient = loss_and_gradient(lambda v: wmse_loss(v, num_views=2, slice_size=8, backend=backend), v)
    assert loss == 0
    assert (gradient == 0).all()
    assert not wmse_loss_with_status(v, num_views=2, slice_size=8)[1].ok.any()


def test_the_loss_is_computed_in_float32_under_autocast(monkeypatch):
    autocast = []

    def spy(*arguments, plain=wmse.FusedLoss.apply):
        autocast.append(torch.is_autocast_enabled("cpu"))
        return plain(*arguments)

    monkeypatch.setattr(wmse.FusedLoss, "apply", spy)
    v, sizes = embeddings(2, 24, 4).float(), {"num_views": 2, "slice_size": 12, "permutations": permutations_of(1, 24)}
    expected = loss_and_gradient(lambda v: wmse_loss(v, **sizes), v)
    with torch.autocast("cpu", torch.bfloat16):
        under = loss_and_gradient(lambda v: wmse_loss(v, **sizes), v)
    assert autocast == [False, False]
    assert all(torch.equal(*pair) for pair in zip(expected, under, strict=True))
    assert wmse_loss(v.bfloat16(), **sizes).dtype == torch.float32


def test_shrinkage_reaches_the_whitening():
    v, sizes = embeddings(2, 24, 4), {"num_views": 2, "slice_size": 12, "permutations": permutations_of(1, 24)}
    v.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: wmse_loss(v, **sizes, eps=0.3), v)
    assert wmse_loss(v, **sizes, eps=0.3) != wmse_loss(v, **sizes)
    shrunk = [wmse_loss(v, **sizes, eps=0.3, backend=backend).item() for backend in ("torch", "reference")]
    assert shrunk[0] == pytest.approx(shrunk[1], rel=1e-9)


def test_only_the_reference_has_a_second_derivative():
    v = embeddings(2, 16, 4).requires_grad_()
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(wmse_loss(v, num_views=2, slice_size=8, backend="torch"), v, create_graph=True)
    sizes = {"num_views": 2, "slice_size": 5, "permutations": permutations_of(1, 5)}
    v = embeddings(2, 5, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda v: wmse_loss(v, **sizes, backend="reference"), v)


def test_the_loss_compiles_as_one_graph():
    v, sizes = embeddings(2, 24, 4), {"num_views": 2, "slice_size": 7, "permutations": permutations_of(1, 21)}
    v = v[:42]
    compiled = torch.compile(lambda v: wmse_loss(v, **sizes), fullgraph=True, backend="aot_eager")
    eager = loss_and_gradient(lambda v: wmse_loss(v, **sizes), v)
    for actual, expected in zip(loss_and_gradient(compiled, v), eager, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("rows", "keywords", "message"),
    [
        (0, {}, "0 images cannot be cut"),
        (400, {"num_views": 3}, "400 rows.*num_views=3"),
        (400, {"slice_size": 128}, "200 images.*slice_size=128.*128 or 256 images"),
        (100, {"slice_size": 64}, "use 64 images"),
        (400, {"slice_size": 4}, "set slice_size above 4; the paper uses 8"),
        (400, {"slice_size": 4, "whitening": "zca"}, "set slice_size above 4"),
        (400, {"slice_size": 1, "whitening": "standardise"}, "slice_size=1 has no variance"),
        (400, {"num_views": 1}, "2 views"),
        (400, {"iterations": 0}, "1 iteration"),
        (400, {"iterations": 2, "permutations": torch.arange(200)[None]}, r"\(2, 200\)"),
        (400, {"permutations": torch.arange(200.0)[None]}, "int64"),
    ],
)
def test_invalid_sizes_are_refused(rows, keywords, message):
    with pytest.raises(InputError, match=message):
        wmse_loss(torch.randn(rows, 4), **{"num_views": 2, "slice_size": 10, **keywords})


def test_embeddings_must_be_a_floating_matrix():
    for v in (torch.zeros(2, 8, 4), torch.zeros(16, 4, dtype=torch.int64)):
        with pytest.raises(InputError, match="floating"):
            wmse_loss(v, num_views=2, slice_size=8)


def test_short_slices_give_one_warning(caplog):
    wmse._warn_once.cache_clear()
    for _ in range(2):
        wmse_loss(embeddings(2, 21, 4), num_views=2, slice_size=7)
        wmse_loss(embeddings(2, 24, 4), num_views=2, slice_size=8)
    logged = [record for record in caplog.records if record.name == wmse.__name__]
    assert [record.levelno for record in logged] == [logging.WARNING]
    assert "slice_size=7" in logged[0].getMessage()
