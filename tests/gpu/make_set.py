"""Draw an image folder for machines that have no photographs: python -m tests.gpu.make_set FOLDER IMAGES

FOLDER/train/{a,b}/N.jpg have 500x375 or 375x500 pixels and about 100 kB, as in ImageNet; every eighth image is a PNG. Every
machine draws the same images.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (500, 375)


def draw(seed: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """Draw colours that change at several scales, and noise. size: width, height."""
    rng = np.random.default_rng(seed)
    width, height = size
    total = np.zeros((height, width, 3), np.float32)
    # Add enlarged random images of 3, 12 and 48 cells along each edge.
    for cells, weight in ((3, 0.5), (12, 0.3), (48, 0.2)):
        colours = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        enlarged = Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)
        total += weight * np.asarray(enlarged, np.float32)
    # The noise gives the files the size of photographs.
    total += rng.normal(0, 8, total.shape).astype(np.float32)
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def make_set(folder: Path, images: int) -> None:
    """Draw `images` images into FOLDER/train/a and b, on all cores."""
    for name in "ab":
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)

    def write(number: int) -> None:
        # Every third image is upright, and the classes alternate.
        size = SIZE if number % 3 else SIZE[::-1]
        image = draw(number, size)
        path = folder / "train" / "ab"[number % 2] / f"{number:06d}"
        if number % 8 == 7:
            image.save(path.with_suffix(".png"), compress_level=1)
        else:
            image.save(path.with_suffix(".jpg"), quality=92)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(images)))


if __name__ == "__main__":
    make_set(Path(sys.argv[1]), int(sys.argv[2]))
    print(f"drew {sys.argv[2]} images into {sys.argv[1]}")
