"""The losses of Barlow Twins and VICReg have the values of published implementations and the gradient of their definitions."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm, mse_loss

from tests.numerics.fixed_tensors import V
from trainer.losses.barlow_twins import barlow_twins_loss
from trainer.losses.vicreg import vicreg_terms


def barlow_twins(v: Tensor, num_views: int) -> Tensor:
    """Return the loss from BatchNorm and one correlation for each pair of views."""
    z = [batch_norm(view, None, None, training=True) for view in v.chunk(num_views)]
    losses = []
    for a in range(num_views):
        for b in range(a):
            c = z[b].T @ z[a] / len(z[a])
            on_diagonal = (c.diagonal() - 1).square().sum()
            losses.append(on_diagonal + 0.0051 * (c - c.diag().diag()).square().sum())
    return torch.stack(losses).mean()


def vicreg(v: Tensor, num_views: int) -> Tensor:
    """Return the sum of the three terms, without weights."""
    views = v.chunk(num_views)
    pairs = [mse_loss(views[a], views[b]) for a in range(num_views) for b in range(a)]
    total = torch.stack(pairs).mean()
    for view in views:
        covariance = torch.cov(view.T)
        spread = (1 - (covariance.diagonal() + 1e-4).sqrt()).relu().mean()
        off_diagonal = (covariance - covariance.diag().diag()).square().sum() / v.shape[1]
        total = total + (spread + 2 * off_diagonal) / num_views
    return total


def test_barlow_twins_has_the_value_of_published_code() -> None:
    loss = barlow_twins_loss(V[:32], num_views=2, num_images=16, off_diagonal_weight=0.0051)
    assert loss.item() == pytest.approx(5.548281017185, abs=1e-12)


def test_vicreg_has_the_values_of_published_code() -> None:
    terms = vicreg_terms(V[:32], num_views=2, num_images=16)
    expected = {"invariance": 0.888854151998, "variance": 0.276870161275, "covariance": 0.042931404374}
    assert {name: value.item() for name, value in terms._asdict().items()} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_views", [2, 3])
@pytest.mark.parametrize("name", ["barlow_twins", "vicreg"])
def test_loss_and_gradient_equal_the_definition(name: str, num_views: int) -> None:
    v = V[: 16 * num_views].clone().requires_grad_()
    if name == "barlow_twins":
        loss = barlow_twins_loss(v, num_views=num_views, num_images=16, off_diagonal_weight=0.0051)
        expected = barlow_twins(v, num_views)
    else:
        loss = torch.stack(list(vicreg_terms(v, num_views=num_views, num_images=16))).sum()
        expected = vicreg(v, num_views)
    assert abs(loss - expected) < 1e-12
    gradients = [torch.autograd.grad(x, v)[0] for x in (loss, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12


def test_white_views_that_agree_cost_nothing() -> None:
    x = torch.linalg.qr(torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0][:, 1:]
    x = torch.linalg.qr(x - x.mean(0))[0] * 4
    v = x.repeat(2, 1)
    assert barlow_twins_loss(v, num_views=2, num_images=16, off_diagonal_weight=1.0) < 1e-8
    assert sum(vicreg_terms(v, num_views=2, num_images=16)) < 1e-8
