"""Compare DALI's views on a GPU with those on the CPU: python -m tests.gpu.check_views OUT.json [--tiny]

Both draw the same plan, for every kind of graph, JPEG and PNG apart (the GPU's JPEG decoder rounds otherwise). Then the loader
runs beside other work of the device: it must make the same batches, and write over none before it is used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gpu.make_set import make_set
from tests.gpu.part import Line, Task, main
from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.index import Index, open_index
from trainer.data.loader import ViewLoader, train_requests
from trainer.data.plan import Planner
from trainer.distributed.ranks import ImageRange

CPU = torch.device("cpu")
STRONG = ViewsConfig(num_views=4, size=224)
RECIPES = {
    "crop first, colour, blur": STRONG,
    "colour first, no blur": replace(STRONG, num_views=2, order="color_first", blur_probability=0.0),
    "bilinear, no colour": replace(
        STRONG, num_views=2, interpolation="bilinear", color_probability=0.0, gray_probability=0.0
    ),
}
STEPS, IMAGES_PER_STEP = 6, 16
# mean difference in levels of 255: of PNG only the arithmetic differs, of JPEG also the decoder
MEAN_BOUND = {"png": 0.6, "jpg": 2.5}


def loader_of(index: Index, recipe: ViewsConfig, device: torch.device) -> ViewLoader:
    """Build the loader of some steps of a plan, the same for each device."""
    images = ImageRange(0, IMAGES_PER_STEP)
    planner = Planner(recipe, seed=3, num_images=len(index), images_per_step=IMAGES_PER_STEP, images=images)
    return ViewLoader(
        index,
        recipe,
        DataConfig(threads=4),
        train_requests(planner),
        batch_size=IMAGES_PER_STEP,
        device=device,
        first_step=0,
        end_step=STEPS,
    )


def batches(index: Index, recipe: ViewsConfig, device: torch.device, *, busy: bool = False) -> list[tuple[Tensor, Any]]:
    """Return (views on the CPU, image ids) of each step. busy: the device has other work as well, as in training."""
    taken = []
    work = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16) if busy and device.type == "cuda" else None
    for batch in loader_of(index, recipe, device):
        for _ in range(16 if work is not None else 0):
            work @ work  # 2 ms each, in which the loader goes on
        taken.append((batch.views.clone(), batch.image_ids.copy()))
    return [(views.cpu(), ids) for views, ids in taken]


def differences(index: Index, recipe: ViewsConfig, device: torch.device) -> dict[str, dict[str, float]]:
    """Return, for each kind of file, the mean, 99.9 % and largest difference in levels from the CPU's views."""
    found: dict[str, list[Tensor]] = {"png": [], "jpg": []}
    for (there, ids), (here, same_ids) in zip(batches(index, recipe, device), batches(index, recipe, CPU), strict=True):
        assert np.array_equal(ids, same_ids)
        gap = (there.int() - here.int()).abs().unflatten(0, (recipe.num_views, IMAGES_PER_STEP))
        for number, image_id in enumerate(ids.tolist()):
            found["png" if index.name(image_id).endswith("png") else "jpg"].append(gap[:, number])
    return {kind: _summary(torch.stack(gaps)) for kind, gaps in found.items() if gaps}


def _summary(gaps: Tensor) -> dict[str, float]:
    values = gaps.flatten().float()
    high = values.sort().values[int(0.999 * (len(values) - 1))]  # torch.quantile takes 16 million values at most
    return {"mean": values.mean().item(), "of_1000_one_above": high.item(), "largest": values.max().item()}


def check_views(task: Task) -> Iterator[Line]:
    """Yield a line for each recipe and kind of file, then one for the busy device."""
    recipes = {"tiny": replace(STRONG, num_views=2, size=32)} if task.tiny else RECIPES
    with tempfile.TemporaryDirectory() as folder:
        make_set(Path(folder), 48)
        index = open_index(Path(folder), "train")
        for name, recipe in recipes.items():
            for kind, figures in differences(index, recipe, task.device).items():
                mean = figures["mean"]
                line: Line = {"name": f"{name}, {kind}", "said": f"{mean:.2f} levels", "levels": figures}
                yield line if mean <= MEAN_BOUND[kind] else {**line, "problem": "too far from the CPU's"}
        calm, busy = (batches(index, next(iter(recipes.values())), task.device, busy=busy) for busy in (False, True))
        other = [step for step, ((a, _), (b, _)) in enumerate(zip(calm, busy, strict=True)) if not torch.equal(a, b)]
        problem = {"problem": f"steps {other} have other views than on an idle device"} if other else {}
        yield {"name": "beside other work", **problem}


if __name__ == "__main__":
    main(check_views, __doc__)
