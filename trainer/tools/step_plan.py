"""`wmse plan`: what a step trains on. The images need not be there, because all choices follow from seed and step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainer.config.schema import Config
from trainer.data.index import Index, open_images
from trainer.data.loader import plan_at, size_at
from trainer.data.plan import Plan, Planner
from trainer.data.row_choices import RowChoices, row_choices
from trainer.distributed.geometry import check_set_size, images_of_rank, indivisible_images
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.errors import InputError
from trainer.schedule import build_schedule, size_steps

COLOURS = ("brightness", "contrast", "saturation", "hue")
_DEFAULT_ROWS = 8
_HEADER = ("row", "image", "view", "crop", "flip", *COLOURS, "order", "grey", "blur", "solarise", "name")
Slice = tuple[int, int, list[int]]
"""Number of the iteration, number of the slice, and its rows."""


def planner_of(config: Config, num_images: int, images: ImageRange | None = None) -> Planner:
    """Return the planner of a run. images: those of one rank; None: of the whole step."""
    per_step = config.data.images_per_step
    return Planner(
        config.views,
        seed=config.seed,
        num_images=num_images,
        images_per_step=per_step,
        images=images or ImageRange(0, per_step),
    )


def plan_lines_of_step(
    config: Config,
    step: int,
    ranks: Ranks,
    *,
    num_images: int = 0,
    rows: str = "",
    as_json: bool = False,
) -> Iterator[str]:
    """Yield the lines of the table, or of JSON.

    num_images: number of images, without opening the data set; 0: open it, or take data.expected_images without data.root.
    ranks: whose rows are shown. rows: "FIRST:LAST", both shown; empty: the first rows in the table, all in JSON.

    Raises InputError if the step or the rows do not exist."""
    index, source = _open(config, num_images)
    if index is not None:
        num_images = len(index)
    elif not num_images:
        num_images = config.data.expected_images
    # Too small a set would have no full step.
    check_set_size(config, num_images, warn=False)
    images = images_of_rank(ranks, config.data.images_per_step, indivisible_images(config))
    planner = planner_of(config, num_images, images)
    schedule = build_schedule(config, planner.steps_per_epoch)
    if not 0 <= step < schedule.total_steps:
        raise InputError(f"--step is {step}: the run has steps 0 to {schedule.total_steps - 1}")
    # Views may be smaller in early epochs.
    sizes = size_steps(config, planner.steps_per_epoch)
    plan = plan_at(planner, sizes, step)
    ids = plan.image_ids
    # Crops are counted in pixels only if the images are known.
    image_sizes = None if index is None else (index.heights[ids], index.widths[ids])
    choices = row_choices(plan, config.views, images.first, ids, image_sizes)

    shown = _rows(rows, images, everything=as_json)
    # The head is the same for the table and for JSON.
    head = {
        "step": step,
        "epoch": plan.epoch,
        "learning_rate": schedule.learning_rate(step),
        "view_size": size_at(sizes, step),
        "rank": ranks.rank,
        "ranks": ranks.world_size,
        "first_row": images.first,
        "rows": images.count,
        "images": num_images,
        "images_from": source,
    }
    slices = _slices_of(config, step, images)
    entries = []
    for row in shown:
        # The choices of a rank begin with its first row.
        place = row - images.first
        entry = row_entry(choices, plan, place)
        entry["name"] = None if index is None else index.name(int(ids[place]))
        entries.append(entry)
    yield from _json(head, entries, slices) if as_json else _table(head, entries, slices)


def _open(config: Config, num_images: int) -> tuple[Index | None, str]:
    """Return the images and where their number comes from."""
    if num_images:
        return None, "--images"
    if config.data.root:
        return open_images(config.data, config.data.train_split), config.data.root
    if config.data.expected_images:
        return None, "data.expected_images"
    raise InputError(
        "data.root is empty and data.expected_images is 0: set one of them or give --images N, since the order depends on the "
        "number of images"
    )


def _rows(text: str, images: ImageRange, *, everything: bool) -> range:
    """Return the rows that "FIRST:LAST" names. Raises InputError if the rank does not have them."""
    end = images.first + images.count
    if not text and everything:
        return range(images.first, end)
    if not text:
        return range(images.first, min(images.first + _DEFAULT_ROWS, end))
    # Both ends are shown, unlike in a range of Python.
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal():
        raise InputError(f"--rows is {text!r}: give FIRST:LAST, such as 0:7")
    # A rank only knows its own rows.
    if not images.first <= int(first) <= int(last) < end:
        raise InputError(f"--rows is {text}: give rows from {images.first} to {end - 1}")
    return range(int(first), int(last) + 1)


def row_entry(choices: RowChoices, plan: Plan, place: int) -> dict[str, Any]:
    """Return the choices of one row by name. place: number of the row among those of `choices`."""
    views = []
    for view in range(choices.flip.shape[1]):
        at = (place, view)
        factors = dict(zip(COLOURS, choices.factors[at].tolist(), strict=True))
        # Without sizes there are no pixels, only the first of the tries to place the crop.
        if choices.crop is not None:
            top, left, height, width = choices.crop[at].tolist()
            crop = {
                "x": left,
                "y": top,
                "w": width,
                "h": height,
            }
        else:
            area, ratio = plan.crop_tries[at][:, 0].tolist()
            top, left = plan.crop_corner[at].tolist()
            crop = {
                "first_try_area": area,
                "first_try_ratio": ratio,
                "left": left,
                "top": top,
            }
        views.append(
            {
                "crop": crop,
                "flip": bool(choices.flip[at]),
                "color": bool(choices.jitter[at]),
                **factors,
                "order": [COLOURS[number] for number in choices.factor_order[at]],
                "gray": bool(choices.gray[at]),
                "blur_sigma": float(choices.blur_sigma[at]),
                "solarize": bool(choices.solarize[at]),
            }
        )
    return {
        "row": int(choices.rows[place]),
        "image": int(choices.image_ids[place]),
        "views": views,
    }


def _slices_of(config: Config, step: int, images: ImageRange) -> list[Slice]:
    """Return each slice with a row of the rank."""
    slices = config.method_settings.slices(config, step)
    # The method cuts no slices.
    if slices is None:
        return []
    # slices: (iterations, slices, M), the row of each place.
    is_of_rank = (slices >= images.first) & (slices < images.first + images.count)
    found = []
    for iteration, number in np.argwhere(is_of_rank.any(-1)).tolist():
        rows = slices[iteration, number].tolist()
        found.append((iteration, number, rows))
    return found


def _json(
    head: dict[str, Any],
    entries: Sequence[dict[str, Any]],
    slices: Sequence[Slice],
) -> Iterator[str]:
    yield json.dumps(head)
    for entry in entries:
        yield json.dumps(entry)
    for iteration, number, rows in slices:
        content = {
            "iteration": iteration,
            "slice": number,
            "rows": rows,
        }
        yield json.dumps(content)


def _table(
    head: dict[str, Any],
    entries: Sequence[dict[str, Any]],
    slices: Sequence[Slice],
) -> Iterator[str]:
    step = head["step"]
    yield (
        f"step {step}, counted from 0 (metrics.jsonl counts it as {step + 1}): epoch {head['epoch']}, learning rate "
        f"{head['learning_rate']:.6g}, views of {head['view_size']} px"
    )
    whose = "the step"
    if head["ranks"] > 1:
        whose = f"rank {head['rank']} of {head['ranks']}"
    last = head["first_row"] + head["rows"] - 1
    yield f"{whose} has {head['rows']} rows, {head['first_row']} to {last}; {head['images']} images ({head['images_from']})"
    if entries and "x" not in entries[0]["views"][0]["crop"]:
        yield (
            "The images were not opened, so their names and sizes are unknown: crop is the uniform number of the first try for "
            "the area and for the ratio, and the position left, top as a share"
        )
    # A line for each view, since the views of an image differ in everything but the image.
    lines: list[tuple[str, ...]] = [_HEADER]
    for entry in entries:
        for number, view in enumerate(entry["views"]):
            lines.append(_line(entry, number, view))
    # Each column is as wide as its longest cell.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        yield "  ".join(cells).rstrip()
    # The first rows are shown if none are named.
    if len(entries) < head["rows"]:
        yield f"{len(entries)} of {head['rows']} rows; --rows FIRST:LAST shows others, --json all"
    for iteration, number, rows in slices:
        yield f"iteration {iteration}, slice {number}: rows {describe_rows(rows)}"


def _line(entry: dict[str, Any], number: int, view: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one view. What is not applied is a dash."""
    crop = view["crop"]
    if "x" in crop:
        crop_text = f"{crop['x']},{crop['y']} {crop['w']}x{crop['h']}"
    else:
        crop_text = " ".join(f"{value:.3f}" for value in crop.values())
    # Jitter that is not applied has factors in the plan, but no effect.
    if view["color"]:
        colours = [f"{view[name]:.3f}" for name in COLOURS]
        order = "".join(name[0] for name in view["order"])
    else:
        colours = ["-"] * len(COLOURS)
        order = "-"
    # Row, image and name stand in the line of the first view.
    row, image, name = "", "", ""
    if number == 0:
        row = str(entry["row"])
        image = str(entry["image"])
        name = entry["name"] or "-"
    return (
        row,
        image,
        str(number),
        crop_text,
        _mark(view["flip"]),
        *colours,
        order,
        _mark(view["gray"]),
        f"{view['blur_sigma']:.2f}" if view["blur_sigma"] else "-",
        _mark(view["solarize"]),
        name,
    )


def _mark(value: bool) -> str:
    return "yes" if value else "-"


def describe_rows(rows: Sequence[int]) -> str:
    """List rows, with neighbours that follow each other as FIRST-LAST."""
    # Each run is a list of rows without a gap.
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts)
