"""The contrastive loss equals fixed values and its definition, and its mean over ranks equals the loss of all rows."""

import math

import pytest
import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.losses.contrastive import contrastive_loss

# V[i, j] = sin(1.7 i + 2.3 j + 0.31 i j), i and j from 1: 4 views of 16 images, view-major
_I = torch.arange(1, 65, dtype=torch.float64)[:, None]
_J = torch.arange(1, 5, dtype=torch.float64)
V = torch.sin(1.7 * _I + 2.3 * _J + 0.31 * _I * _J)


def definition(v: Tensor, num_views: int, temperature: float, normalize: bool = True) -> Tensor:
    """Return the InfoNCE loss, computed pair by pair.

    It is the cross-entropy of each row over the rows of the other view and those of the same view without the row itself.
    """
    views = v.unflatten(0, (num_views, -1))
    if normalize:
        views = views / views.norm(dim=-1, keepdim=True)
    losses = []
    for a in range(num_views):
        for b in range(num_views):
            if a == b:
                continue
            for i, row in enumerate(views[a]):
                others = [row @ column for column in views[b]]
                others += [row @ column for j, column in enumerate(views[a]) if j != i]
                losses.append(torch.logsumexp(torch.stack(others) / temperature, 0) - row @ views[b][i] / temperature)
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("num_views", "options", "value"),
    [
        (2, {"temperature": 0.5}, 3.650869423297),
        (4, {"temperature": 0.5}, 3.724790465804),
        (2, {"temperature": 1.0, "normalize": False}, 3.619598379193),
    ],
)
def test_the_loss_has_the_values_of_the_authors_code(num_views: int, options: dict, value: float) -> None:
    """The values are those of the W-MSE authors' published `contrastive_loss` for V; for 4 views the mean over pairs."""
    assert contrastive_loss(V[: 16 * num_views], num_views=num_views, **options).item() == pytest.approx(
        value, abs=1e-12
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_views", [2, 3])
def test_loss_and_gradient_equal_the_definition(num_views: int, normalize: bool) -> None:
    v = V[: 6 * num_views].clone().requires_grad_()
    options = {"num_views": num_views, "temperature": 0.7, "normalize": normalize}
    loss = contrastive_loss(v, **options)
    (gradient,) = torch.autograd.grad(loss, v)
    expected = definition(v, **options)
    (expected_gradient,) = torch.autograd.grad(expected, v)
    assert abs(loss - expected) < 1e-12
    assert (gradient - expected_gradient).abs().max() < 1e-12


@pytest.mark.parametrize("num_views", [2, 4])
def test_the_mean_over_ranks_is_the_loss_of_all_rows(num_views: int) -> None:
    """Four ranks have four images each. The gradient is the sum of those at the candidates."""
    v = V[: 16 * num_views].clone().requires_grad_()
    whole = contrastive_loss(v, num_views=num_views)
    (expected,) = torch.autograd.grad(whole, v)
    by_view = v.unflatten(0, (num_views, 16))
    parts = [
        contrastive_loss(by_view[:, first : first + 4].flatten(0, 1), v, num_views=num_views, first_image=first)
        for first in range(0, 16, 4)
    ]
    mean = torch.stack(parts).mean()
    (gradient,) = torch.autograd.grad(mean, v)
    assert abs(mean - whole) < 1e-12
    assert (gradient - expected).abs().max() < 1e-12


def test_equal_views_cost_nothing_and_equal_embeddings_cost_log_2n_minus_1() -> None:
    """Equal views have loss 0 as the temperature approaches 0. Embeddings without information have loss log(2N - 1)."""
    same = torch.nn.functional.normalize(V[:16], dim=1).repeat(2, 1)
    assert contrastive_loss(same, num_views=2, temperature=1e-3) < 1e-3
    assert contrastive_loss(torch.ones(32, 4, dtype=torch.float64), num_views=2).item() == pytest.approx(math.log(31))


def test_the_order_of_images_does_not_matter() -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    moved = V[:32].unflatten(0, (2, 16))[:, order].flatten(0, 1)
    assert abs(contrastive_loss(moved, num_views=2) - contrastive_loss(V[:32], num_views=2)) < 1e-12


def test_the_loss_is_computed_in_float32_under_autocast() -> None:
    v = V[:32].float()
    with torch.autocast("cpu", torch.bfloat16):
        found = contrastive_loss(v, num_views=2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, contrastive_loss(v, num_views=2))


@pytest.mark.parametrize(
    ("v", "candidates", "options", "message"),
    [
        (V[:31], None, {"num_views": 2}, "v must be floating of shape"),
        (V[:32].long(), None, {"num_views": 2}, "int64"),
        (V[:32], V[:31], {"num_views": 2}, "candidates must be"),
        (V[:32], V[:32, :3], {"num_views": 2}, "candidates must be"),
        (V[:32], None, {"num_views": 1}, "2 views or more"),
        (V[:2], None, {"num_views": 2}, "candidates hold 1 image: give 2 images or more"),
        (V[:16], V[:32], {"num_views": 2, "first_image": 9}, "images 9 to 16 are not among the candidates 0 to 15"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(v: Tensor, candidates: Tensor | None, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        contrastive_loss(v, candidates, **options)
