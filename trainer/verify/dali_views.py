"""The views of a plan drawn by the program's DALI graph, without its loader. `wmse verify` and the tests use it."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.config.schema import ViewsConfig
from trainer.data.dali_graph import Placement, eval_arrays, eval_recipe, view_arrays, view_pipeline
from trainer.data.plan import Plan, Planner
from trainer.distributed.ranks import ImageRange


def draw_plan(recipe: ViewsConfig, num_images: int, seed: int = 1) -> Plan:
    """Return the plan of a step that shows each of `num_images` images once."""
    planner = Planner(
        recipe, seed=seed, num_images=num_images, images_per_step=num_images, images=ImageRange(0, num_images)
    )
    return planner.plan(0)


def sizes(encoded: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the heights and the widths of encoded images, in pixels."""
    # PIL gives width and height, in this order.
    both = np.array([Image.open(io.BytesIO(data)).size for data in encoded])
    return both[:, 1], both[:, 0]


def dali_views(encoded: list[bytes], plan: Plan, recipe: ViewsConfig, gpu: int | None = None) -> Tensor:
    """Return the views of a plan as DALI draws them, (d, N, 3, S, S) uint8, on the CPU. gpu: its number; None: the CPU."""
    return dali_run(encoded, recipe, view_arrays(plan, recipe, *sizes(encoded)), gpu)


def dali_eval(encoded: list[bytes], recipe: ViewsConfig, gpu: int | None = None) -> Tensor:
    """Return the centre crops of an evaluation, (N, 3, S, S) uint8, on the CPU."""
    recipe = eval_recipe(recipe)
    return dali_run(encoded, recipe, eval_arrays(recipe, *sizes(encoded)), gpu)[0]


def dali_run(encoded: list[bytes], recipe: ViewsConfig, arrays: list[np.ndarray], gpu: int | None = None) -> Tensor:
    """Run the DALI graph on the given arrays and return its outputs, (d, N, 3, S, S) uint8, on the CPU."""
    images = [np.frombuffer(data, np.uint8) for data in encoded]
    pipe = view_pipeline(recipe, len(encoded), Placement(gpu, 2, 1), lambda: [images, *arrays])
    views = []
    # An output is valid until the pipeline runs again or ends, so it is copied.
    for output in pipe.run():
        if gpu is not None:
            output = output.as_cpu()
        views.append(torch.from_dlpack(output.as_tensor()).clone())
    # DALI returns channels last, (d, N, S, S, 3).
    return torch.stack(views).permute(0, 1, 4, 2, 3)
