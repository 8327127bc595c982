"""The loader of most public code: the workers of a DataLoader open each file with Pillow and transform it d times."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import v2

from trainer.config.schema import Config, ViewsConfig
from trainer.data.index import Index, open_index

MODES = {"bicubic": v2.InterpolationMode.BICUBIC, "bilinear": v2.InterpolationMode.BILINEAR}


class TorchvisionViews(Dataset):
    """d augmented views of each image, each (3, S, S) uint8; with `normalize` float32, normalised."""

    def __init__(self, index: Index, recipe: ViewsConfig, normalize: bool = False) -> None:
        self.index = index
        self.num_views = recipe.num_views
        # The same augmentations as the recipe, in torchvision's implementation. Their random numbers differ from the plan's.
        jitter = v2.ColorJitter(recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
        blur = v2.GaussianBlur(recipe.blur_window, recipe.blur_sigma)
        to_floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(recipe.mean), list(recipe.std))]
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(recipe.size, recipe.crop_area, recipe.crop_ratio, MODES[recipe.interpolation]),
                v2.RandomHorizontalFlip(recipe.flip_probability),
                v2.RandomApply([jitter], recipe.color_probability),
                v2.RandomGrayscale(recipe.gray_probability),
                v2.RandomApply([blur], float(np.mean(recipe.blur_probability))),  # the mean over the views
                v2.PILToTensor(),
                *(to_floats if normalize else []),
            ]
        )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> list[torch.Tensor]:
        encoded = io.BytesIO(self.index.read(i))
        image = Image.open(encoded).convert("RGB")
        return [self.transform(image) for _ in range(self.num_views)]


def torchvision_batches(config: Config, workers: int, *, normalize: bool = False) -> Iterator[Any]:
    """Start a DataLoader with `workers` processes, which yields d tensors (N, 3, S, S) uint8.

    normalize: the workers also normalise the views, to float32."""
    index = open_index(Path(config.data.root), config.data.train_split)
    data = TorchvisionViews(index, config.views, normalize)
    images = config.data.images_per_step
    # This number of samples never ends in a measurement, so no epoch ends in a window.
    sampler = RandomSampler(data, replacement=False, num_samples=1 << 30)
    prefetch = 2 if workers else None
    loader = DataLoader(data, images, sampler=sampler, num_workers=workers, prefetch_factor=prefetch, drop_last=True)
    return iter(loader)
