"""The first row in which two runs differ: both plans are drawn again, and skipped images are replaced as they were."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.loader import plan_at
from trainer.data.row_choices import RowChoices, row_choices, rows_digest
from trainer.diff.sides import Side
from trainer.errors import InputError
from trainer.schedule import size_steps
from trainer.tools.step_plan import COLOURS, planner_of

_NAMES = {
    "image_ids": "image",
    "crop": "crop (top, left, height, width)",
    "flip": "flip",
    "jitter": "change of colours",
    "factor_order": "order of the colour changes",
    "gray": "grey",
    "blur_sigma": "blur",
    "solarize": "solarisation",
}


class RowDifference(NamedTuple):
    """The first value in which the rows of two runs differ."""

    step: int
    """Counted from 0."""
    row: int
    view: int | None
    """None: the images differ."""
    value: str
    a: Any
    b: Any
    skipped: dict[str, Any] | None = None
    """The entry of quarantine.jsonl, with the key "run", if only one run skipped the image."""

    def describe(self) -> str:
        """Say in words what differs."""
        if self.view is None:
            text = f"row {self.row} of step {self.step} shows image {self.a} in A and {self.b} in B"
        else:
            text = f"row {self.row} of step {self.step}, view {self.view}, has {self.value} {self.a} in A and {self.b} in B"
        if self.skipped:
            text += (
                f", because only {self.skipped['run']} skipped image {self.skipped['id']} ({self.skipped['image']}: "
                f"{self.skipped['problem']})"
            )
        return text


class RowsOfRun:
    """Draws the rows of a run again."""

    def __init__(self, side: Side) -> None:
        """side: must know the number of its images."""
        self.side = side
        self._num_images = int(side.data["images"])
        self._planner = planner_of(side.config, self._num_images)
        # Views may be smaller in early epochs, which changes their crops.
        self._sizes = size_steps(side.config, self._planner.steps_per_epoch)

    def planned(self, step: int) -> NDArray[np.int64]:
        """Return the images that the plan names."""
        return self._planner.image_ids(step)

    def skipped(self, step: int) -> dict[int, dict[str, Any]]:
        """Return the skipped images that were known in a step, by number."""
        return {entry["id"]: entry for entry in self.side.quarantine if entry["step"] <= step}

    def choices(self, step: int, *, with_sizes: bool) -> RowChoices:
        """Return the choices for the images that were shown."""
        plan = plan_at(self._planner, self._sizes, step)
        ids = plan.image_ids.copy()
        skipped = list(self.skipped(step))
        # As in the loader, the next image of the set that can be used replaces a skipped one.
        is_skipped = np.isin(ids, skipped)
        # A damaged quarantine may name every image.
        if len(set(skipped)) >= self._num_images:
            raise InputError(f"{self.side.folder / 'quarantine.jsonl'} names every image of the set: it is damaged")
        while is_skipped.any():
            ids[is_skipped] = (ids[is_skipped] + 1) % self._num_images
            is_skipped = np.isin(ids, skipped)
        index = self.side.index
        sizes = None
        if with_sizes and index is not None:
            sizes = (index.heights[ids], index.widths[ids])
        return row_choices(plan, self.side.config.views, 0, ids, sizes)

    def digest(self, first: int, end: int) -> int | None:
        """Return the digest of the rows of steps first <= step < end; None if the sizes of the images are unknown."""
        # The digest contains crops in pixels.
        if self.side.index is None:
            return None
        total = 0
        for step in range(first, end):
            choices = self.choices(step, with_sizes=True)
            total += rows_digest(choices)
        return total % 2**64


def first_row_difference(a: RowsOfRun, b: RowsOfRun, first: int, end: int) -> RowDifference | None:
    """Return the first difference in the steps first <= step < end; None if the plans are the same.

    The runs have the same number of images in a step and of views."""
    # Crops can only be compared in pixels, for which the sizes of the images must be known.
    with_sizes = a.side.index is not None and b.side.index is not None
    for step in range(first, end):
        ours = a.choices(step, with_sizes=with_sizes)
        theirs = b.choices(step, with_sizes=with_sizes)
        found = _difference_of_step(ours, theirs)
        if found is None:
            continue
        # Other images of the same plan come from skipped images.
        has_same_plan = np.array_equal(a.planned(step), b.planned(step))
        if found.view is None and has_same_plan:
            skipped = _skipped_by_one(a.skipped(step), b.skipped(step), found)
            found = found._replace(skipped=skipped)
        return found
    return None


def _difference_of_step(a: RowChoices, b: RowChoices) -> RowDifference | None:
    """Return the first difference of a step: of the lowest row, its image first, then its views."""
    # For each kind of value, whether it differs in a row.
    differs: dict[str, NDArray[np.bool_]] = {}
    for name in (*_NAMES, "factors"):
        ours = getattr(a, name)
        theirs = getattr(b, name)
        if ours is not None and theirs is not None:
            differs[name] = (ours != theirs).reshape(len(ours), -1).any(1)
    has_difference = np.stack(list(differs.values())).any(0)
    if not has_difference.any():
        return None
    # argmax returns the first row, and later the first view.
    row = int(np.argmax(has_difference))
    # The image decides everything else of a row, and it stands first in `_NAMES`.
    name = next(name for name, of_rows in differs.items() if of_rows[row])
    ours = getattr(a, name)[row]
    theirs = getattr(b, name)[row]
    if name == "image_ids":
        return RowDifference(a.step, row, None, "image", int(ours), int(theirs))
    by_view = (ours != theirs).reshape(len(ours), -1)
    view = int(np.argmax(by_view.any(1)))
    if name == "factors":
        number = int(np.argmax(by_view[view]))
        factor_a = float(ours[view, number])
        factor_b = float(theirs[view, number])
        return RowDifference(a.step, row, view, COLOURS[number], factor_a, factor_b)
    return RowDifference(a.step, row, view, _NAMES[name], ours[view].tolist(), theirs[view].tolist())


def _skipped_by_one(
    a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], found: RowDifference
) -> dict[str, Any] | None:
    """Return the entry of the skipped image that explains why the images of a row differ."""
    # The run that did not skip the image still shows it.
    for name, skipped, shown in (("A", a, found.b), ("B", b, found.a)):
        if shown in skipped:
            return {"run": name, **skipped[shown]}
    return None
