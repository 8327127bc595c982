"""A set without pictures, and batches that no loader made: what a run needs before its first step, and no more.

Shapes: N images of this rank in the step, d views, S pixels a side.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.config.schema import Config
from trainer.data.index_file import IndexContent, write_index
from trainer.data.tar_shards import describe_shards
from trainer.distributed.ranks import Ranks
from trainer.setup import Run, set_up

CLASSES = 1000
IMAGE_BYTES, IMAGE_HEIGHT, IMAGE_WIDTH = 110_000, 375, 500  # about ImageNet's medians
# cells a side of a synthetic picture: noise of single pixels would look the same to an encoder that averages
_COARSE = 5


def write_index_only(root: Path, split: str, num_images: int) -> Path:
    """ROOT/SPLIT.index of `num_images` images with names as ImageNet's, and an empty shard that it points into.

    The set opens, and can't be read. -> the index file.
    """
    shard = root / f"{split}-000000.tar"
    shard.touch()
    labels = np.arange(num_images, dtype=np.int32) * CLASSES // num_images
    columns = {
        "label": labels.astype("<i4"),
        "height": np.full(num_images, IMAGE_HEIGHT, "<i4"),
        "width": np.full(num_images, IMAGE_WIDTH, "<i4"),
        "nbytes": np.full(num_images, IMAGE_BYTES, "<u4"),
        "kind": np.zeros(num_images, np.uint8),
        "shard": np.zeros(num_images, "<u2"),
        "block": np.arange(num_images, dtype="<u4"),
    }
    names = [f"n{label:08d}_{number}.JPEG" for number, label in enumerate(labels.tolist())]
    metadata = {
        "split": split,
        "class_names": [f"n{label:08d}" for label in range(CLASSES)],
        "shards": describe_shards([shard]),
    }
    path = root / f"{split}.index"
    write_index(path, IndexContent(columns, names, metadata))
    return path


def synthetic_run(config: Config, ranks: Ranks, device: torch.device, folder: Path) -> Run:
    """The run of `config` as `setup.set_up` makes it, of a set that is an index only: its step works, its loader can't.

    folder: empty, of this rank; the set goes there. Raises InputError as set_up does.
    """
    split, images = config.data.train_split, config.data.images_per_step
    write_index_only(folder, split, images)
    data = replace(config.data, root=str(folder), expected_images=0, decode_cache_gib=0.0)
    return set_up(replace(config, data=data, init_from=""), ranks, device, folder)


def synthetic_views(run: Run, seed: int = 0) -> Tensor:
    """One batch of this rank, (d*N, 3, S, S) uint8, channels_last, on the device: smooth random pictures, all different."""
    views, size = run.config.views, run.config.views.size
    rows = views.num_views * run.planner.images.count
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(rows, 3, _COARSE, _COARSE, generator=generator).to(run.device)
    out = torch.empty(rows, 3, size, size, dtype=torch.uint8, device=run.device, memory_format=torch.channels_last)
    for first in range(0, rows, 64):  # in pieces: float32 pictures of a whole step would be the peak of memory
        part = slice(first, first + 64)
        out[part] = 255 * F.interpolate(coarse[part], size=size, mode="bilinear", align_corners=True)
    return out
