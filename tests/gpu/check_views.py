"""Compare DALI's views on a GPU with those on the CPU: python -m tests.gpu.check_views OUT.json [--tiny]

Both follow the same plan, for every kind of graph. JPEG and PNG are compared separately, because the GPU's JPEG decoder rounds
differently. The kernels of the augmentation are compared with DALI's graph on the same device. Then the loader runs beside
other work of the device: it must yield the same batches, and not overwrite one before it is used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.backends import why_no_kernels
from tests.gpu.make_set import make_set
from tests.gpu.part import Line, Task, attempt, main
from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.index import Index, open_index
from trainer.data.loader import ViewLoader, train_requests
from trainer.data.plan import Planner
from trainer.distributed.ranks import ImageRange
from trainer.models.encoder import Normalize

CPU = torch.device("cpu")
STRONG = ViewsConfig(num_views=4, size=224)
RECIPES = {
    "crop first, colour, blur": STRONG,
    "colour first, no blur": replace(STRONG, num_views=2, order="color_first", blur_probability=0.0),
    "bilinear, no colour": replace(
        STRONG, num_views=2, interpolation="bilinear", color_probability=0.0, gray_probability=0.0
    ),
}
STEPS = 6
IMAGES_PER_STEP = 16
# Largest mean difference in levels of 255. For PNG only the arithmetic differs, for JPEG also the decoder.
MEAN_BOUND = {"png": 0.6, "jpg": 2.5}
# The kernels start from the same pixels as DALI's graph, so only results near the middle between two levels may differ.
KERNELS_BOUND = 0.05


def loader_of(
    index: Index, recipe: ViewsConfig, device: torch.device, views_dtype: torch.dtype | None = None
) -> ViewLoader:
    """Build the loader of a few steps. Its plan is the same for each device. views_dtype: see `ViewLoader`."""
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
        views_dtype=views_dtype,
    )


def batches(index: Index, recipe: ViewsConfig, device: torch.device, *, busy: bool = False) -> list[tuple[Tensor, Any]]:
    """Return (views on the CPU, image ids) of each step. busy: give the device other work as well, as in training."""
    taken = []
    has_work = busy and device.type == "cuda"
    work = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16) if has_work else torch.ones(1)
    for batch in loader_of(index, recipe, device):
        # Each product takes about 2 ms, while the loader works on the next batches.
        for _ in range(16 if has_work else 0):
            work @ work
        taken.append((batch.views.clone(), batch.image_ids.copy()))
    return [(views.cpu(), ids) for views, ids in taken]


def differences(index: Index, recipe: ViewsConfig, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the mean, 99.9 % and largest difference to the CPU's views in levels, for each kind of file."""
    found: dict[str, list[Tensor]] = {"png": [], "jpg": []}
    on_device = batches(index, recipe, device)
    on_cpu = batches(index, recipe, CPU)
    for (views, ids), (expected, same_ids) in zip(on_device, on_cpu, strict=True):
        assert np.array_equal(ids, same_ids)
        # (d, N, 3, S, S)
        difference = (views.int() - expected.int()).abs().unflatten(0, (recipe.num_views, IMAGES_PER_STEP))
        for number, image_id in enumerate(ids.tolist()):
            kind = "png" if index.name(image_id).endswith("png") else "jpg"
            found[kind].append(difference[:, number])
    return {kind: _summary(torch.stack(gaps)) for kind, gaps in found.items() if gaps}


def check_kernels(index: Index, recipe: ViewsConfig, device: torch.device) -> Line:
    """Compare the views of the augmentation's kernels with those of DALI's graph on the same device, in levels."""
    normalize = Normalize(recipe)
    by_dali = batches(index, recipe, device)
    by_kernels = [batch.views.clone().cpu() for batch in loader_of(index, recipe, device, torch.float32)]
    pairs = zip(by_kernels, by_dali, strict=True)
    gaps = [(normalize.undo(views).int() - expected.int()).abs() for views, (expected, _) in pairs]
    figures = _summary(torch.stack(gaps))
    line: Line = {"said": f"{figures['mean']:.4f} levels", "levels": figures}
    if not (figures["mean"] <= KERNELS_BOUND and figures["largest"] <= 1):
        line["problem"] = f"the kernels differ from DALI by more than one level, or {KERNELS_BOUND} in the mean"
    return line


def _summary(differences: Tensor) -> dict[str, float]:
    values = differences.flatten().float()
    # torch.quantile takes at most 16 million values.
    at = int(0.999 * (len(values) - 1))
    high = values.sort().values[at]
    return {"mean": values.mean().item(), "of_1000_one_above": high.item(), "largest": values.max().item()}


def check_views(task: Task) -> Iterator[Line]:
    """Yield a line for each recipe and kind of file, one for its kernels, and one for the busy device."""
    recipes = {"tiny": replace(STRONG, num_views=2, size=32)} if task.tiny else RECIPES
    with tempfile.TemporaryDirectory() as folder:
        make_set(Path(folder), 48)
        index = open_index(Path(folder), "train")
        for name, recipe in recipes.items():
            for kind, figures in differences(index, recipe, task.device).items():
                mean = figures["mean"]
                line: Line = {"name": f"{name}, {kind}", "said": f"{mean:.2f} levels", "levels": figures}
                if not mean <= MEAN_BOUND[kind]:
                    line["problem"] = f"differs from the CPU by more than {MEAN_BOUND[kind]} levels in the mean"
                yield line
            if why_no_kernels(task.device.type) is None:
                yield attempt(f"{name}, kernels", partial(check_kernels, index, recipe, task.device))
        # The same batches must come whether the device is idle or busy.
        first_recipe = next(iter(recipes.values()))
        idle = batches(index, first_recipe, task.device)
        busy = batches(index, first_recipe, task.device, busy=True)
        pairs = enumerate(zip(idle, busy, strict=True))
        changed = [step for step, ((a, _), (b, _)) in pairs if not torch.equal(a, b)]
        line = {"name": "beside other work"}
        if changed:
            line["problem"] = f"steps {changed} have other views than on an idle device"
        yield line


if __name__ == "__main__":
    main(check_views, __doc__)
