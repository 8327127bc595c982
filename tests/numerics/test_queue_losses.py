"""The losses with a queue, of MoCo and of alignment and uniformity, have the values of published implementations."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from tests.numerics.fixed_tensors import QUEUE, TARGETS, V
from trainer.losses.align_uniform import alignment, uniformity
from trainer.losses.queue_contrast import queue_contrast_loss

QUERIES = normalize(V[:32], dim=1).chunk(2)
KEYS = normalize(TARGETS[:32], dim=1).chunk(2)


def test_the_contrastive_loss_has_the_values_of_published_code() -> None:
    """The values are those of two public implementations of MoCo v2: one way, and the mean of both ways."""
    one = queue_contrast_loss(QUERIES[0], KEYS[1], QUEUE, temperature=0.2)
    other = queue_contrast_loss(QUERIES[1], KEYS[0], QUEUE, temperature=0.2)
    assert one.item() == pytest.approx(6.445703505700, abs=1e-12)
    assert (one + other).item() / 2 == pytest.approx(6.206661596281, abs=1e-12)


def test_the_gradient_of_the_contrastive_loss_is_that_of_its_definition() -> None:
    q = QUERIES[0].clone().requires_grad_()
    loss = queue_contrast_loss(q, KEYS[1], QUEUE, temperature=0.2)
    rows = []
    for query, key in zip(q, KEYS[1], strict=True):
        scores = torch.stack([query @ key, *(query @ old for old in QUEUE)]) / 0.2
        rows.append(torch.logsumexp(scores, 0) - scores[0])
    expected = torch.stack(rows).mean()
    gradients = [torch.autograd.grad(x, q)[0] for x in (loss, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12


def test_equal_queries_and_keys_with_an_orthogonal_queue_have_a_known_loss() -> None:
    """The loss is then log(1 + K exp(-1 / temperature))."""
    q = torch.eye(4, dtype=torch.float64)[:1]
    queue = torch.eye(4, dtype=torch.float64)[1:]
    loss = queue_contrast_loss(q, q, queue, temperature=0.2)
    assert loss.item() == pytest.approx(math.log(1 + 3 * math.exp(-5)), abs=1e-12)


def test_alignment_and_uniformity_have_the_values_of_the_authors_code() -> None:
    """The values follow from the authors' public code, with a queue and without."""
    align = alignment(QUERIES[0], KEYS[1])
    uniform = uniformity(QUERIES[0], QUEUE, t=3)
    assert align.item() == pytest.approx(2.198226621334, abs=1e-12)
    assert uniform.item() == pytest.approx(-2.744144188155, abs=1e-12)
    assert (3 * align + uniform).item() == pytest.approx(3.850535675846, abs=1e-12)
    assert alignment(*QUERIES).item() == pytest.approx(1.837413527637, abs=1e-12)
    both = [uniformity(rows, t=2).item() for rows in QUERIES]
    assert sum(both) / 2 == pytest.approx(-2.679936992835, abs=1e-12)


def test_the_gradient_of_the_uniformity_is_that_of_its_definition() -> None:
    q = QUERIES[0].clone().requires_grad_()
    found = uniformity(q, QUEUE, t=3)
    pairs = [(a - b).square().sum() for i, a in enumerate(q) for b in [*q[:i], *QUEUE]]
    expected = (-3 * torch.stack(pairs)).exp().mean().log()
    assert abs(found - expected) < 1e-12
    # Rows of length 1 stay on the sphere, so only the gradient along it counts.
    gradients = [torch.autograd.grad(x, q)[0] for x in (found, expected)]
    difference = gradients[0] - gradients[1]
    along = difference - (difference * q).sum(1, keepdim=True) * q
    assert along.abs().max() < 1e-12


def test_equal_rows_are_aligned_and_have_uniformity_0() -> None:
    same = QUERIES[0][:1].repeat(5, 1)
    assert alignment(same, same) == 0
    assert uniformity(same, same, t=3).item() == pytest.approx(0, abs=1e-12)
