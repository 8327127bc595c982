"""Time the loader or the whole loop on drawn images: python -m tests.gpu.time_images OUT.json loader|end2end FOLDER [--tiny]

loader: times batches alone, with the augmentation by DALI and by Triton, and samples how busy the GPU's JPEG engine is.
end2end: times the real loop, the parts of its step, and the same step alone. FOLDER: images of tests.gpu.make_set.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from kernels.backends import why_no_kernels
from tests.gpu.part import Line, Task, attempt, main, without_waiting
from tests.gpu.time_step import RECIPE, TINY
from trainer.bench.end2end import bench_end2end
from trainer.bench.loader import bench_loader
from trainer.bench.timing import interleave, spread, timed
from trainer.config.schema import Config
from trainer.data.dali_graph import view_arrays
from trainer.data.plan import Planner
from trainer.distributed.ranks import ImageRange
from trainer.loop import train

SAMPLE = ["nvidia-smi", "--query-gpu=utilization.jpeg", "--format=csv,noheader,nounits", "--loop-ms=200"]


def time_images(task: Task) -> Iterator[Line]:
    """Yield the lines of the measurement that the command names."""
    kind, folder = task.words
    config = TINY if task.tiny else RECIPE
    data = replace(config.data, root=folder)
    log = replace(config.log, tensorboard=False)
    config = replace(config, data=data, log=log)
    measure = loader if kind == "loader" else end2end
    yield from measure(config, task)


def loader(config: Config, task: Task) -> Iterator[Line]:
    """Yield the views per second with either backend of the augmentation, and the use of the JPEG engine with DALI's."""
    yield from loader_by_dali(config, task)
    if why_no_kernels(task.device.type):
        return
    yield attempt("augmentation", lambda: augmentation(config, task))
    if not task.tiny:  # interpreted kernels take seconds
        by_triton = replace(config, data=replace(config.data, augment_backend="triton"))
        result = bench_loader(by_triton, 8.0)
        yield {"name": "loader, triton", "said": f"{result['views_per_s']:,.0f} views/s", **result}


def augmentation(config: Config, task: Task) -> Line:
    """Time the kernels alone, for the views of one step."""
    from trainer.data.augment import Augmentation, split_choices

    recipe = config.views
    images = config.data.images_per_step
    planner = Planner(recipe, seed=0, num_images=images, images_per_step=images, images=ImageRange(0, images))
    side = np.full(images, 256)
    _, choices = split_choices(view_arrays(planner.plan(0), recipe, side, side), recipe)
    shape = (images, recipe.size, recipe.size, 3)
    views = [torch.randint(256, shape, dtype=torch.uint8, device=task.device) for _ in range(recipe.num_views)]
    out = torch.empty(len(choices), *shape[1:], dtype=torch.bfloat16, device=task.device)
    augment = Augmentation(recipe, task.device)
    # The first call compiles the kernels.
    augment(views, choices, out)
    without_waiting(lambda: augment(views, choices, out), task.device)
    windows = {"step": timed(lambda: augment(views, choices, out), task.device)}
    figure = spread(interleave(windows, 0.1 if task.tiny else 2.0)["step"], 1e3)
    return {"said": f"{figure['median']:.2f} ms for {len(choices)} views", "ms": figure}


def loader_by_dali(config: Config, task: Task) -> Iterator[Line]:
    """Yield the views per second, and the use of the JPEG engine meanwhile."""
    # Sample the utilisation in another process while the loader runs.
    try:
        samples = subprocess.Popen(SAMPLE, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        samples = None
    result = bench_loader(config, 0.5 if task.tiny else 16.0)
    yield {"name": "loader", "said": f"{result['views_per_s']:,.0f} views/s", **result}
    if samples is None:
        return
    samples.terminate()
    output, _ = samples.communicate()
    # Cards without a JPEG engine give no numbers.
    percent = [float(line) for line in output.splitlines() if line.strip().isdigit()]
    if len(percent) > 1:
        figure = spread(percent)
        yield {"name": "JPEG engine", "said": f"{figure['median']:.0f} % busy", "percent": figure}


def end2end(config: Config, task: Task) -> Iterator[Line]:
    """Yield the views per second of the loop, their share of the step alone, and the parts of a profiled step."""
    result = bench_end2end(config, 1.0 if task.tiny else 40.0, train)
    assert result is not None
    said = f"{result['views_per_s']:,.0f} views/s, {result['share_of_compute']:.0%} of the step alone"
    yield {"name": "end2end", "said": said, **result}
    # Name the parts that take at least 1 %.
    percent = result["step"]["percent"]
    parts = [f"{name} {round(value, 1)}" for name, value in percent.items() if value >= 1]
    yield {"name": "a step's percent", "said": ", ".join(parts)}


if __name__ == "__main__":
    main(time_images, __doc__)
