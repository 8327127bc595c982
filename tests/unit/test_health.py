"""Health of the embeddings, against slow direct definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from trainer import metrics
from trainer.distributed.ranks import Ranks
from trainer.methods.wmse.method import WMSE
from trainer.metrics import DelayedMetrics, MetricSums
from trainer.run.health import measure_health, sums_of_products
from trainer.step import RankFlags

VIEWS, IMAGES, K = 3, 40, 6
NO_FLAGS = RankFlags(*torch.zeros(3, dtype=torch.int32).unbind())


def draw(seed: int = 0, images: int = IMAGES, k: int = K) -> torch.Tensor:
    """Return embeddings (3*images, k), view-major, off the origin, with a content that the views of an image share."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randn(1, images, k, generator=generator) @ torch.randn(k, k, generator=generator)
    noise = torch.randn(VIEWS, images, k, generator=generator) * torch.linspace(0.05, 0.4, VIEWS)[:, None, None]
    return (content + noise + 2.0).flatten(0, 1)


def measured(x: torch.Tensor, num_views: int = VIEWS) -> dict[str, float]:
    return measure_health(sums_of_products(x, num_views).numpy())


def exp_entropy(values: np.ndarray) -> float:
    shares = values / np.abs(values).sum() + 1e-7
    return math.exp(-sum(share * math.log(share) for share in shares))


@pytest.mark.parametrize("images", [IMAGES, 1])
def test_rankme_is_that_of_the_singular_values(images: int) -> None:
    """With one image there are fewer rows than dimensions."""
    x = draw(images=images)
    singular = np.linalg.svd(x.double().numpy(), compute_uv=False)
    assert measured(x)["rankme"] == pytest.approx(exp_entropy(singular), rel=1e-4)


def test_lidar_is_that_of_a_linear_discriminant_analysis_of_the_images() -> None:
    x = draw().double().numpy().reshape(VIEWS, IMAGES, K)
    between, within = np.zeros((K, K)), 1e-4 * np.eye(K)
    mean = x.mean((0, 1))
    for image in range(IMAGES):
        views = x[:, image]
        of_image = views.mean(0)
        between += np.outer(of_image - mean, of_image - mean) / IMAGES
        for view in views:
            within += np.outer(view - of_image, view - of_image) / (IMAGES * VIEWS)
    root = np.linalg.inv(scipy.linalg.sqrtm(within))
    expected = exp_entropy(np.linalg.eigvalsh(root @ between @ root))
    assert measured(draw())["lidar"] == pytest.approx(expected, rel=1e-5)
    assert 1 < expected < K


def test_the_spectrum_and_the_condition_of_each_view() -> None:
    x = draw()
    x[IMAGES : 2 * IMAGES] *= torch.tensor([1, 1, 1, 1, 1, 1e-2])
    covariances = [np.cov(view.double().numpy().T) for view in x.chunk(VIEWS)]
    conditions = [np.linalg.cond(covariance) for covariance in covariances]
    found = measured(x)
    assert found["condition_view"] == int(np.argmax(conditions)) == 1
    assert found["condition"] == pytest.approx(max(conditions), rel=1e-5)
    values = np.linalg.eigvalsh(np.cov(x.double().numpy().T))[::-1]
    assert found["largest_share"] == pytest.approx(values[0] / values.sum(), rel=1e-5)
    assert values[: int(found["dimensions_99"])].sum() >= 0.99 * values.sum()
    assert values[: int(found["dimensions_99"]) - 1].sum() < 0.99 * values.sum()


def test_a_scale_changes_only_what_depends_on_it() -> None:
    found, scaled = measured(draw()), measured(1000 * draw())
    for name in ("rankme", "largest_share", "dimensions_99", "condition"):
        assert scaled[name] == pytest.approx(found[name], rel=1e-4)


def test_values_that_are_not_defined_are_nan() -> None:
    one_view = measured(draw(), 1)
    assert math.isnan(one_view["lidar"])
    assert one_view["condition"] > 1
    few = measured(draw(images=K))  # as many images as dimensions
    assert math.isnan(few["condition"])
    assert math.isnan(few["condition_view"])
    constant = measured(torch.ones(VIEWS * IMAGES, K))
    assert constant["rankme"] == pytest.approx(1, abs=1e-4)
    assert math.isnan(constant["lidar"])
    assert math.isinf(constant["condition"])
    assert math.isnan(constant["dimensions_99"])
    broken = draw()
    broken[3, 2] = math.nan
    assert all(math.isnan(value) for value in measured(broken).values())


def test_the_sums_of_two_ranks_add_up() -> None:
    """Each rank has the views of its own images."""
    x = draw().unflatten(0, (VIEWS, IMAGES))
    shares = [sums_of_products(x[:, part].flatten(0, 1), VIEWS) for part in (slice(0, 20), slice(20, None))]
    torch.testing.assert_close(shares[0] + shares[1], sums_of_products(draw(), VIEWS), rtol=1e-12, atol=1e-9)


def test_products_travel_with_the_delayed_metrics() -> None:
    late = DelayedMetrics(0)
    late.add(1, NO_FLAGS, {}, MetricSums(WMSE.metrics, torch.device("cpu")).take(draw(), Ranks(), VIEWS))
    (record,) = late.ready()
    np.testing.assert_array_equal(record["products"], sums_of_products(draw(), VIEWS).numpy())


def test_large_embeddings_only_have_an_effective_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_DIMENSIONS", K - 1)
    sums = MetricSums(WMSE.metrics, torch.device("cpu"))
    taken = sums.take(draw(), Ranks(), VIEWS)
    assert "products" not in taken
    monkeypatch.undo()
    expected = sums.take(draw(), Ranks(), VIEWS)["effective_rank"]
    assert taken["effective_rank"].item() == pytest.approx(expected.item())
