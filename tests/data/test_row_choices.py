"""The digest of rows: what it covers, and what does not change it."""

import numpy as np
import pytest

from trainer.config.schema import ViewsConfig
from trainer.data.plan import Planner
from trainer.data.row_choices import RowChoices, row_choices, row_hashes, rows_digest
from trainer.distributed.ranks import ImageRange

RECIPE = ViewsConfig(num_views=3, solarize_probability=0.5)


def choices(first: int = 0, count: int = 8, *, seed: int = 0, step: int = 5) -> RowChoices:
    images = ImageRange(first, count)
    plan = Planner(RECIPE, seed=seed, num_images=100, images_per_step=8, images=images).plan(step)
    sizes = (np.full(count, 300), np.full(count, 400))
    return row_choices(plan, RECIPE, first, plan.image_ids, sizes)


def test_the_digest_of_a_step_is_the_sum_over_any_division_of_its_rows() -> None:
    parts = [choices(0, 2), choices(2, 5), choices(7, 1)]
    assert sum(map(rows_digest, parts)) % 2**64 == rows_digest(choices())
    assert len(set(row_hashes(choices()).tolist())) == 8


# what a program may get wrong: no step, no row, one field that does not count
@pytest.mark.parametrize("name", RowChoices._fields)
def test_every_choice_counts(name: str) -> None:
    given = choices()
    if name == "step":
        other = given._replace(step=given.step + 1)
    else:
        changed = getattr(given, name).copy()
        place = (3, *(0,) * (changed.ndim - 1))
        changed[place] = not changed[place] if changed.dtype == bool else changed[place] + 1
        other = given._replace(**{name: changed})
    different = row_hashes(other) != row_hashes(given)
    assert different.all() if name == "step" else different.tolist() == [row == 3 for row in range(8)]


def test_two_changes_of_sign_do_not_cancel() -> None:
    """They would in a sum of products, because the highest bit only reaches the highest bit of a product."""
    given = choices()
    factors = given.factors.copy()
    factors[2:4, 0, 3] *= -1
    assert rows_digest(given._replace(factors=factors)) != rows_digest(given)


def test_choices_that_change_places_change_the_digest() -> None:
    given = choices()
    swapped = given._replace(crop=given.crop[:, ::-1]) if given.crop is not None else given
    assert rows_digest(swapped) != rows_digest(given)
