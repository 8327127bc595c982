"""Draw what the model sees: each row an image and its d views, from the real pipeline."""

from __future__ import annotations

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
_GAP = 2


def write_preview(config: Config, num_images: int, out: Path, step: int = 0) -> str:
    """Write a PNG grid of the first images of a step with the views that this run's seed gives them; return a line that says
    what it shows. Pixels go through the model's scaling and back to 0..255. Raises InputError."""
    if out.suffix.lower() not in Image.registered_extensions():
        raise InputError(f"--out is {out}: give a name with an image suffix, such as preview.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    index = open_images(config.data, config.data.train_split, progress=True)
    images_per_step = min(config.data.images_per_step, len(index))  # a set may be smaller than the step of the recipe
    num_images = min(num_images, images_per_step)
    if num_images < 1:
        raise InputError(f"--images is {num_images}: give at least 1")
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
    views = _shown(batch.views, config).unflatten(0, (config.views.num_views, num_images))
    originals = [_fit(decode(index.read(int(i))), views.shape[-1]) for i in batch.image_ids]
    rows = [[originals[n], *(v[n].permute(1, 2, 0).numpy() for v in views)] for n in range(num_images)]
    grid = np.concatenate([np.concatenate([_cell(cell) for cell in row], axis=1) for row in rows], axis=0)
    Image.fromarray(grid).save(out)
    return f"{out}: {num_images} images, each beside its {config.views.num_views} views of step {step} (seed {config.seed})"


def _shown(pixels: Tensor, config: Config) -> Tensor:
    """Put (R, 3, S, S) uint8 through the model's scaling and back to uint8, so that losses there become visible."""
    scale = Normalize(config.views)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (config.views.mean, config.views.std))
    return ((scale(pixels) * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def _fit(pixels: np.ndarray, side: int) -> np.ndarray:
    """The whole image (H, W, 3) inside a square of `side` pixels, (side, side, 3)."""
    image = Image.fromarray(pixels)
    scale = side / max(image.size)
    small = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    square = Image.new("RGB", (side, side), "white")
    square.paste(small, ((side - small.width) // 2, (side - small.height) // 2))
    return np.asarray(square)


def _cell(pixels: np.ndarray) -> np.ndarray:
    factor = -(-_SMALLEST_CELL // pixels.shape[0])
    large = pixels.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.pad(large, ((_GAP, _GAP), (_GAP, _GAP), (0, 0)), constant_values=255)
