"""Our loader against torchvision's usual one on the same images and recipe, alternating in one run.

    python benchmarks/loader_peers.py --config FILE --out JSON [--seconds S] [--section.key value ...]

The peer is what most public SSL code uses: a DataLoader whose workers open the file with Pillow once, and put the image
through torchvision.transforms d times. Prints the ratio of medians; JSON last.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import v2

from trainer.bench.loader import WARMUP_STEPS, WINDOWS, endless_loader, measure
from trainer.config import Config, ViewsConfig
from trainer.config_load import load_config
from trainer.data.index import Index, open_index
from trainer.machine import provenance


class TorchvisionViews(Dataset):
    """d augmented uint8 views of each image."""

    def __init__(self, index: Index, recipe: ViewsConfig) -> None:
        self.index, self.num_views = index, recipe.num_views
        mode = {"bicubic": v2.InterpolationMode.BICUBIC, "bilinear": v2.InterpolationMode.BILINEAR}[
            recipe.interpolation
        ]
        jitter = v2.ColorJitter(recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
        blur = v2.GaussianBlur(recipe.blur_window, recipe.blur_sigma)
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(recipe.side, recipe.crop_area, recipe.crop_ratio, mode),
                v2.RandomHorizontalFlip(recipe.flip_probability),
                v2.RandomApply([jitter], recipe.color_probability),
                v2.RandomGrayscale(recipe.gray_probability),
                v2.RandomApply([blur], recipe.blur_probability),
                v2.PILToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> list[torch.Tensor]:
        image = Image.open(io.BytesIO(self.index.read(i))).convert("RGB")
        return [self.transform(image) for _ in range(self.num_views)]


def torchvision_batches(config: Config, workers: int) -> Iterator[Any]:
    """Batch after batch from a DataLoader with `workers` processes."""
    data = TorchvisionViews(open_index(Path(config.data.root), config.data.train_split), config.views)
    images = config.data.images_per_step
    sampler = RandomSampler(data, replacement=False, num_samples=1 << 30)  # type: ignore[arg-type]
    return iter(DataLoader(data, images, sampler=sampler, num_workers=workers, prefetch_factor=2, drop_last=True))


def main() -> None:
    """Measure both, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each loader")
    parser.add_argument("--workers", type=int, default=2)
    own, settings = parser.parse_known_args()
    config = load_config(own.config, settings)
    views = config.data.images_per_step * config.views.num_views
    rates: dict[str, list[float]] = {"ours": [], "torchvision": []}
    for _ in range(WINDOWS):  # a loader lives only in its own windows, so that neither works ahead in the other's
        for name, make in (
            ("ours", lambda: endless_loader(config)),
            ("torchvision", lambda: torchvision_batches(config, own.workers)),
        ):
            batches = make()
            for _ in range(WARMUP_STEPS):
                next(batches)
            rates[name].append(measure(batches, views, own.seconds / WINDOWS))
            del batches
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "bench": "loader_peers",
        "views_per_s": medians,
        "ratio": medians["ours"] / medians["torchvision"],
        "windows": rates,
        "workers": own.workers,
        "images_per_step": config.data.images_per_step,
        "views": config.views.num_views,
        "side": config.views.side,
        **provenance(torch.device("cpu")),
    }
    own.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
