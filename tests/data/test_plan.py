"""A plan depends only on seed and step; its choices have the recipe's probabilities, and its windows equal torchvision's."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.schema import ViewsConfig
from trainer.data.plan import PLAN_VERSION, Plan, Planner, crop_windows, epoch_order, slice_permutations
from trainer.distributed.ranks import ImageRange

RECIPE = ViewsConfig(
    num_views=3, brightness=0.4, contrast=0.5, saturation=1.2, hue=0.1, blur_sigma=(0.1, 2.0), solarize_probability=0.3
)
DRAWN = Plan._fields[Plan._fields.index("crop_tries") :]


def planner(
    rows: ImageRange | None = None, *, seed: int = 0, images: int = 50, step: int = 8, recipe=RECIPE
) -> Planner:
    return Planner(recipe, seed=seed, num_images=images, images_per_step=step, images=rows or ImageRange(0, step))


def plan(step: int = 0, *, seed: int = 0) -> Plan:
    return planner(seed=seed).plan(step)


def large_plan(recipe: ViewsConfig = RECIPE) -> Plan:
    return planner(images=4000, step=4000, recipe=recipe).plan(0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("step", [0, 5, 13])
def test_each_rank_draws_its_rows_of_the_plan_of_all_ranks(ranks, step):
    count = 8 // ranks
    parts = [planner(ImageRange(rank * count, count)).plan(step) for rank in range(ranks)]
    joined = plan(step)
    for name in ("image_ids", *DRAWN):
        np.testing.assert_array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(joined, name))
    assert {p.epoch for p in parts} == {step // 6}


def test_a_seed_gives_the_same_plan_in_every_version():
    """If this fails, the code or numpy has changed the plan of a seed: raise PLAN_VERSION and update the hash."""
    digest = hashlib.blake2b(digest_size=8)
    for step in (0, 7):
        p = plan(step, seed=3)
        windows = crop_windows(p, RECIPE, np.arange(100, 108), np.arange(300, 308))
        drawn_first = p[
            : Plan._fields.index("solarize")
        ]  # solarisation was added later, without a change of the others
        for values in (*drawn_first, windows, slice_permutations(3, step, 8, 3, 4)):
            digest.update(np.ascontiguousarray(values).tobytes())
    assert (PLAN_VERSION, digest.hexdigest()) == (1, "163a8838175955f9")


def test_a_plan_does_not_depend_on_earlier_steps():
    one = planner()
    for step in (9, 0, 7):
        one.plan(step)
    for name in ("image_ids", *DRAWN):
        np.testing.assert_array_equal(getattr(one.plan(7), name), getattr(plan(7), name))


@pytest.mark.parametrize("other", [plan(1), plan(6), plan(seed=1)], ids=["step", "epoch", "seed"])
def test_plans_of_other_steps_epochs_and_seeds_differ(other):
    for name in ("image_ids", *DRAWN):
        assert not np.array_equal(getattr(other, name), getattr(plan(), name)), name


def test_each_view_of_each_image_has_other_choices():
    p = plan()
    for name in ("crop_tries", "crop_corner", "factors"):
        rows = getattr(p, name).reshape(8 * 3, -1)
        assert len(np.unique(rows, axis=0)) == 8 * 3, name


def test_an_epoch_shows_each_image_at_most_once_and_each_epoch_has_another_order():
    one = planner(images=50, step=8)
    assert one.steps_per_epoch == 6
    epochs = [np.concatenate([one.plan(6 * epoch + step).image_ids for step in range(6)]) for epoch in range(3)]
    for ids in epochs:
        assert len(np.unique(ids)) == 48
        assert 0 <= ids.min() <= ids.max() < 50
    assert len({frozenset(ids) for ids in epochs}) > 1, "every epoch lacks the same images"
    assert np.mean(epochs[0] == epochs[1]) < 0.2


def test_the_order_of_an_epoch_is_a_permutation_that_differs_by_epoch_and_seed():
    orders = [epoch_order(seed, epoch, 1000) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(1000))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(orders[a] == orders[b]) < 0.02
    assert abs(np.corrcoef(orders[0], np.arange(1000))[0, 1]) < 0.1


def test_probabilities_and_ranges_are_those_of_the_recipe():
    p = large_plan()
    for values, share in (
        (p.flip, RECIPE.flip_probability),
        (p.jitter, RECIPE.color_probability),
        (p.gray, RECIPE.gray_probability),
        (p.blur_sigma > 0, RECIPE.blur_probability),
        (p.solarize, RECIPE.solarize_probability),
    ):
        assert np.mean(values) == pytest.approx(share, abs=0.02)  # 12,000 draws: 4 standard deviations
    limits = [(0.6, 1.4), (0.5, 1.5), (0.0, 2.2), (-0.1, 0.1), (0.1, 2.0)]
    drawn = [*np.moveaxis(p.factors, -1, 0), p.blur_sigma[p.blur_sigma > 0]]
    for values, (low, high) in zip(drawn, limits, strict=True):
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high >= values.max() > high - 0.01 * (high - low)
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.02 * (high - low))


def test_blur_and_solarisation_change_no_other_choice_and_may_differ_by_view():
    """Fewer views than the recipe has, as in an evaluation, take the probabilities of the first."""
    recipe = replace(RECIPE, blur_probability=(1.0, 0.0, 0.3), solarize_probability=(0.0, 0.2, 1.0))
    p, before = large_plan(recipe), large_plan()
    np.testing.assert_allclose((p.blur_sigma > 0).mean(0), (1.0, 0.0, 0.3), atol=0.03)
    np.testing.assert_allclose(p.solarize.mean(0), (0.0, 0.2, 1.0), atol=0.03)
    for name in ("crop_tries", "crop_corner", "flip", "jitter", "factors", "factor_order", "gray"):
        np.testing.assert_array_equal(getattr(p, name), getattr(before, name))
    two = large_plan(replace(recipe, num_views=2))
    np.testing.assert_allclose(two.solarize.mean(0), (0.0, 0.2), atol=0.03)


def test_all_orders_of_the_colour_factors_are_equally_frequent():
    orders, counts = np.unique(large_plan().factor_order.reshape(-1, 4), axis=0, return_counts=True)
    assert len(orders) == 24
    assert counts.min() > 400  # 500 expected


def test_choices_are_independent_of_each_other():
    p = large_plan()
    columns = [
        p.flip,
        p.jitter,
        p.gray,
        p.blur_sigma > 0,
        p.solarize,
        *np.moveaxis(p.factors, -1, 0),
        *np.moveaxis(p.crop_corner, -1, 0),
    ]
    correlation = np.corrcoef(np.stack([c.ravel().astype(float) for c in columns]))
    assert np.abs(correlation - np.eye(len(columns))).max() < 0.05


@pytest.mark.parametrize("field", ["flip", "jitter", "gray"])
def test_probability_0_means_never_and_1_always(field):
    option = {"flip": "flip_probability", "jitter": "color_probability", "gray": "gray_probability"}[field]
    for probability in (0.0, 1.0):
        values = getattr(large_plan(ViewsConfig(**{option: probability})), field)
        assert np.all(values == bool(probability))


def torchvision_window(u_area, u_ratio, u_corner, height, width, recipe):
    """Return the window (top, left, height, width) that RandomResizedCrop.get_params draws from these uniform numbers."""
    log_low, log_high = (math.log(r) for r in recipe.crop_ratio)
    for a, r in zip(u_area, u_ratio, strict=True):
        area = height * width * (recipe.crop_area[0] + (recipe.crop_area[1] - recipe.crop_area[0]) * a)
        ratio = math.exp(log_low + (log_high - log_low) * r)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(u_corner[0] * (height - h + 1)), int(u_corner[1] * (width - w + 1)), h, w
    h, w = height, width
    if width / height < recipe.crop_ratio[0]:
        h = round(width / recipe.crop_ratio[0])
    elif width / height > recipe.crop_ratio[1]:
        w = round(height * recipe.crop_ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


PIXELS = st.one_of(st.integers(1, 12), st.integers(1, 6000))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(PIXELS, PIXELS), min_size=8, max_size=8),
    st.integers(0, 1000),
    st.sampled_from([0.08, 0.9, 1.0]),
)
def test_windows_equal_torchvision_and_are_inside_the_image(sizes, step, smallest_area):
    recipe = ViewsConfig(num_views=3, crop_area=(smallest_area, 1.0))
    p = planner(recipe=recipe).plan(step)
    heights, widths = np.array(sizes).T
    windows = crop_windows(p, recipe, heights, widths)
    for n, (height, width) in enumerate(sizes):
        for view in range(3):
            top, left, h, w = windows[n, view]
            assert 0 <= top < top + h <= height
            assert 0 <= left < left + w <= width
            expected = torchvision_window(*p.crop_tries[n, view], p.crop_corner[n, view], height, width, recipe)
            assert (top, left, h, w) == expected


def test_windows_reach_all_borders():
    p = large_plan()
    top, left, h, w = np.moveaxis(crop_windows(p, RECIPE, np.full(4000, 20), np.full(4000, 20)), -1, 0)
    inside = (h < 20) & (w < 20)
    assert {0} == {int(x[inside].min()) for x in (top, left, 20 - top - h, 20 - left - w)}


def test_permutations_begin_with_the_identity_and_stay_inside_their_blocks():
    orders = slice_permutations(0, 5, 48, 4, 12)
    np.testing.assert_array_equal(orders[0], np.arange(48))
    for order in orders[1:]:
        np.testing.assert_array_equal(order // 12, np.arange(48) // 12)
        np.testing.assert_array_equal(np.sort(order), np.arange(48))
        assert not np.array_equal(order, orders[0])
    assert len(np.unique(orders, axis=0)) == 4
    assert not np.array_equal(orders[1:], slice_permutations(0, 6, 48, 4, 12)[1:])
    assert not np.array_equal(orders[1:], slice_permutations(1, 5, 48, 4, 12)[1:])
    assert not np.array_equal(orders[1, :12], orders[1, 12:24] - 12), "all blocks have one order"


def test_one_iteration_has_only_the_identity_permutation():
    np.testing.assert_array_equal(slice_permutations(0, 5, 10, 1, 7), np.arange(10)[None])
