"""Draw the views that the encoder sees, as a PNG: each row has an image and its d views, from the real pipeline.

Shapes: N images, d views of each, R = d*N, S the size of a view in pixels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.config.schema import Config
from trainer.data.decoding import decode
from trainer.data.index import open_images
from trainer.data.loader import ViewLoader, train_requests
from trainer.data.plan import Planner
from trainer.distributed.ranks import ImageRange
from trainer.errors import InputError
from trainer.models.networks import Normalize

_SMALLEST_CELL = 96  # pixels; smaller views are enlarged by a whole factor
_GAP = 2  # white pixels around a cell


def write_preview(config: Config, num_images: int, out: Path, step: int = 0) -> str:
    """Draw the first images of a step and the views that the run's seed gives them. Returns a line that describes the file.

    Raises InputError if `out` has no suffix of an image, or if num_images is below 1."""
    if out.suffix.lower() not in Image.registered_extensions():
        raise InputError(f"--out is {out}: give a name with an image suffix, such as preview.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    index = open_images(config.data, config.data.train_split, progress=True)
    images_per_step = min(config.data.images_per_step, len(index))  # a small set may not fill one step
    num_images = min(num_images, images_per_step)
    if num_images < 1:
        raise InputError(f"--images is {num_images}: give at least 1")

    # Load one step, as the training would.
    planner = Planner(
        config.views,
        seed=config.seed,
        num_images=len(index),
        images_per_step=images_per_step,
        images=ImageRange(0, num_images),
    )
    loader = ViewLoader(
        index,
        config.views,
        replace(config.data, read_ahead_steps=1),
        train_requests(planner),
        batch_size=num_images,
        device=torch.device("cpu"),
        first_step=step,
        end_step=step + 1,
    )
    batch = next(iter(loader))

    # Draw a row for each image.
    num_views = config.views.num_views
    views = _through_scaling(batch.views, config).unflatten(0, (num_views, num_images))
    views_of_images = views.permute(1, 0, 3, 4, 2).numpy()  # (N, d, S, S, 3)
    rows = []
    for image_id, views_of_image in zip(batch.image_ids, views_of_images, strict=True):
        original = decode(index.read(int(image_id)))
        cells = [_fit(original, views.shape[-1]), *views_of_image]
        rows.append(np.concatenate([_cell(cell) for cell in cells], axis=1))
    grid = np.concatenate(rows, axis=0)
    Image.fromarray(grid).save(out)
    return f"{out} shows {num_images} images and the {num_views} views of each in step {step} (seed {config.seed})"


def _through_scaling(pixels: Tensor, config: Config) -> Tensor:
    """Scale (R, 3, S, S) uint8 as the encoder does, and back to uint8, so that faults of the scaling become visible."""
    scale = Normalize(config.views)
    mean = torch.tensor(config.views.mean).view(1, 3, 1, 1)
    std = torch.tensor(config.views.std).view(1, 3, 1, 1)
    shares = scale(pixels) * std + mean
    return (shares * 255).round().clamp(0, 255).to(torch.uint8)


def _fit(pixels: np.ndarray, size: int) -> np.ndarray:
    """Return the whole image (H, W, 3) inside a white square, (size, size, 3)."""
    image = Image.fromarray(pixels)
    scale = size / max(image.size)
    width = max(1, round(image.width * scale))
    height = max(1, round(image.height * scale))
    # Paste it into the centre.
    square = Image.new("RGB", (size, size), "white")
    left = (size - width) // 2
    top = (size - height) // 2
    square.paste(image.resize((width, height)), (left, top))
    return np.asarray(square)


def _cell(pixels: np.ndarray) -> np.ndarray:
    """Enlarge a small view, and surround it with a gap."""
    factor = math.ceil(_SMALLEST_CELL / pixels.shape[0])
    large = pixels.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.pad(large, ((_GAP, _GAP), (_GAP, _GAP), (0, 0)), constant_values=255)
