"""SwAV's loss has the value of published implementations, and its assignments are balanced."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, normalize

from tests.numerics.fixed_tensors import PROTOTYPES, V
from trainer.losses.swapped import assignments, swapped_prediction_loss

SCORES = normalize(V, dim=1) @ PROTOTYPES.T  # (64, 6): 4 views of 16 images
OPTIONS = {"temperature": 0.1, "epsilon": 0.05, "iterations": 3}


def published_assignments(scores: Tensor) -> Tensor:
    """Return the assignments (N, C) in the published order of the divisions, with all of their constants."""
    q = (scores / 0.05).exp().T
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / q.shape[0]
        q = q / q.sum(0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


def definition(scores: Tensor, num_views: int) -> Tensor:
    views = scores.chunk(num_views)
    losses = [
        -(published_assignments(views[a].detach()) * log_softmax(views[b] / 0.1, 1)).sum(1).mean()
        for a in range(num_views)
        for b in range(num_views)
        if a != b
    ]
    return torch.stack(losses).mean()


def test_the_loss_has_the_value_of_published_code() -> None:
    """The value is that of two public implementations of SwAV."""
    loss = swapped_prediction_loss(SCORES[:32], num_views=2, **OPTIONS)
    assert loss.item() == pytest.approx(6.425059170040, abs=1e-12)


@pytest.mark.parametrize("num_views", [2, 3])
def test_loss_and_gradient_equal_the_definition(num_views: int) -> None:
    scores = SCORES[: 16 * num_views].clone().requires_grad_()
    loss = swapped_prediction_loss(scores, num_views=num_views, **OPTIONS)
    expected = definition(scores, num_views)
    assert abs(loss - expected) < 1e-12
    gradients = [torch.autograd.grad(x, scores)[0] for x in (loss, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12


def test_rows_sum_to_1_and_prototypes_get_equal_shares_in_the_limit() -> None:
    views = SCORES[:32].unflatten(0, (2, 16))
    few, many = (assignments(views, 0.05, count) for count in (3, 1000))
    for q in (few, many):
        torch.testing.assert_close(q.sum(2), torch.ones(2, 16, dtype=torch.float64))
    torch.testing.assert_close(many.sum(1), torch.full((2, 6), 16 / 6, dtype=torch.float64))
    assert (few.sum(1) - 16 / 6).abs().max() > 0.1


def test_scores_without_information_cost_the_log_of_the_number_of_prototypes() -> None:
    loss = swapped_prediction_loss(torch.zeros(8, 3000), num_views=2, **OPTIONS)
    assert loss.item() == pytest.approx(math.log(3000), rel=1e-6)


def test_the_largest_scores_do_not_overflow_in_float32() -> None:
    scores = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(2, 1)
    assert swapped_prediction_loss(scores, num_views=2, **OPTIONS).isfinite()
