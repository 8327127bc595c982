"""The loss of BYOL and SimSiam has the values of published implementations and the gradient of its definition."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, mse_loss, normalize

from tests.numerics.fixed_tensors import TARGETS, V
from trainer.errors import InputError
from trainer.losses.regression import regression_loss


def definition(p: Tensor, t: Tensor, num_views: int, normalized: bool) -> Tensor:
    """Return the mean over pairs of views of the sum of both directions, pair by pair."""
    p_views, t_views = p.chunk(num_views), t.chunk(num_views)
    losses = []
    for a in range(num_views):
        for b in range(a):
            if normalized:
                both = [2 - 2 * cosine_similarity(p_views[i], t_views[j]).mean() for i, j in ((a, b), (b, a))]
            else:
                both = [mse_loss(p_views[i], t_views[j]) for i, j in ((a, b), (b, a))]
            losses.append(both[0] + both[1])
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("normalized", "value"), [(True, 4.185300731721), (False, 2.045109388648)])
def test_the_loss_has_the_values_of_the_authors_code(normalized: bool, value: float) -> None:
    """The values are those of the W-MSE authors' published BYOL."""
    loss = regression_loss(V[:32], TARGETS[:32], num_views=2, normalize=normalized)
    assert loss.item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("num_views", [2, 3])
def test_loss_and_gradient_equal_the_definition(num_views: int, normalized: bool) -> None:
    p = V[: 16 * num_views].clone().requires_grad_()
    t = TARGETS[: 16 * num_views]
    loss = regression_loss(p, t, num_views=num_views, normalize=normalized)
    expected = definition(p, t, num_views, normalized)
    assert abs(loss - expected) < 1e-12
    gradients = [torch.autograd.grad(x, p)[0] for x in (loss, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12


def test_without_a_predictor_it_is_twice_the_distance_of_w_mse_without_whitening() -> None:
    u = normalize(V[:32], dim=1)
    distance = (u[:16] - u[16:]).square().sum(1).mean()
    assert abs(regression_loss(V[:32], V[:32], num_views=2) - 2 * distance) < 1e-12


def test_the_loss_is_computed_in_float32_under_autocast() -> None:
    p, t = V[:32].float(), TARGETS[:32].float()
    with torch.autocast("cpu", torch.bfloat16):
        found = regression_loss(p, t, num_views=2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, regression_loss(p, t, num_views=2))


@pytest.mark.parametrize(("p", "t", "num_views"), [(V[:32], V[:30], 2), (V[:31], V[:31], 2), (V[:32], V[:32], 1)])
def test_shapes_that_do_not_fit_are_refused(p: Tensor, t: Tensor, num_views: int) -> None:
    with pytest.raises(InputError, match="predictions and targets must have the same shape"):
        regression_loss(p, t, num_views=num_views)
