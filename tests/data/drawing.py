"""Helpers of the tests of plan, colour and views: they draw plans, make images and run the DALI graph."""

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


def smooth_picture(seed: int, height: int, width: int) -> bytes:
    """Return a PNG of coloured waves with a little noise, about as colourful as a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    pixels = 128 + rng.normal(0, 6, (height, width, 3))
    for _ in range(8):
        across, down, phase = rng.uniform(-6, 6, 3)
        wave = np.sin(2 * np.pi * (across * x / width + down * y / height) + phase)[..., None]
        pixels += wave * (rng.uniform(-25, 25) + rng.uniform(-8, 8, 3))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def sizes(encoded: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the heights and the widths of encoded images, in pixels."""
    both = np.array([Image.open(io.BytesIO(data)).size for data in encoded])
    return both[:, 1], both[:, 0]


def dali_views(encoded: list[bytes], plan: Plan, recipe: ViewsConfig) -> Tensor:
    """Return the views of a plan as DALI draws them, (d, N, 3, S, S) uint8."""
    return dali_run(encoded, recipe, view_arrays(plan, recipe, *sizes(encoded)))


def dali_eval(encoded: list[bytes], recipe: ViewsConfig) -> Tensor:
    """Return the centre crops of an evaluation, (N, 3, S, S) uint8."""
    recipe = eval_recipe(recipe)
    return dali_run(encoded, recipe, eval_arrays(recipe, *sizes(encoded)))[0]


def dali_run(encoded: list[bytes], recipe: ViewsConfig, arrays: list[np.ndarray]) -> Tensor:
    """Run the DALI graph on the given arrays and return its outputs, (d, N, 3, S, S) uint8."""
    images = [np.frombuffer(data, np.uint8) for data in encoded]
    pipe = view_pipeline(recipe, len(encoded), Placement(None, 2, 1), lambda: [images, *arrays])
    views = torch.stack([torch.from_dlpack(output.as_tensor()).clone() for output in pipe.run()])
    return views.permute(0, 1, 4, 2, 3)
