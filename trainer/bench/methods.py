"""Compare the steps of several methods: `TrainStep` on batches that are already on the device, in alternating windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.bench.compute import fixed_steps, sizes
from trainer.bench.timing import MIN_CALLS, interleave, spread
from trainer.config.checks import check
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import problem_list
from trainer.run.machine import provenance
from trainer.sweep.definition import SweepRun


def bench_methods(rows: Sequence[SweepRun], seconds: float, views: int = 0) -> dict[str, Any]:
    """Measure a step of each row of a sweep at the same number of views, for about `seconds` in all.

    views: number of views of each step; 0: that of the first row.
    Returns a dict for JSON: figures holds the milliseconds of a step by row, times the ratio of its median to that of the
    first row, and skipped_steps the number of skipped updates, which take less time.

    Raises InputError if a row's method does not support the number of views."""
    device = choose_device(rows[0].config, Ranks())
    views = views or rows[0].config.data.images_per_step * rows[0].config.views.num_views
    configs = {row.row: _with_views(row, views) for row in rows}
    steps = {name: fixed_steps(config, Ranks(), device) for name, config in configs.items()}
    # The first steps compile the model, so neither their time nor their skipped updates count.
    for each in steps.values():
        each.warm_up()
        each.take_skipped()
    windows = {name: each.window() for name, each in steps.items()}
    # Alternating windows share the changes of the machine's speed, so the ratios do not contain them.
    samples = interleave(windows, seconds, min_calls=MIN_CALLS[device.type])
    figures = {name: spread(values, 1e3) for name, values in samples.items()}
    base = figures[rows[0].row]["median"]
    return {
        "bench": "methods",
        "views_per_step": views,
        "unit": "ms a step",
        "figures": figures,
        "times": {name: figure["median"] / base for name, figure in figures.items()},
        "skipped_steps": {name: each.take_skipped() for name, each in steps.items()},
        **sizes(configs[rows[0].row], device, Ranks()),
        **provenance(device),
    }


def _with_views(row: SweepRun, views: int) -> Config:
    """Return the row's config with as many images in a step as give `views` views."""
    # All rows encode the same number of views, so a row with more views has fewer images.
    images, rest = divmod(views, row.config.views.num_views)
    config = replace(row.config, data=replace(row.config.data, images_per_step=images))
    problems = check(config)
    if rest:
        problems = [f"{views} views are not a multiple of views.num_views {row.config.views.num_views}: change --views"]
    if problems:
        raise problem_list(f"row {row.row} cannot make steps of {views} views", problems)
    return config
