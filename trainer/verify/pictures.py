"""Images for the checks: the demo's photographs, and coloured pictures made of them."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainer.data.index import Index, open_index
from trainer.files import shipped_folder

_TILES = 4  # in each direction, so that a picture of 28 px tiles has 112 px


def demo_root() -> Path:
    """Return the folder of the demo's data set."""
    return shipped_folder("demo_data")


@cache
def coloured_pictures(count: int) -> list[bytes]:
    """Return PNG files of 112 x 84 px or 84 x 112 px, mosaics of the demo's photographs.

    The photographs are grey. Each channel is a mixture of two of them, in the middle half of the levels, so that most changes
    of colour stay inside 0..255."""
    index = open_index(demo_root(), "test")
    pictures = []
    for number in range(count):
        # Each picture takes its own photographs: a mosaic for each of three channels.
        first = number * 3 * _TILES * _TILES
        planes = [_mosaic(index, first + channel * _TILES * _TILES) for channel in range(3)]
        grey = sum(planes) / 3
        channels = [64 + (0.7 * grey + 0.3 * plane) / 2 for plane in planes]
        pixels = np.rint(np.stack(channels, axis=-1)).astype(np.uint8)
        # Height and width differ, so that they cannot be exchanged.
        pixels = pixels[:84] if number % 2 else pixels[:, :84]
        # PNG keeps every level, so that decoders cannot differ.
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        pictures.append(buffer.getvalue())
    return pictures


def _mosaic(index: Index, first: int) -> NDArray[np.float64]:
    """Return photographs from number `first` on as one grey picture, (112, 112)."""
    tiles = []
    for number in range(first, first + _TILES * _TILES):
        photograph = Image.open(io.BytesIO(index.read(number))).convert("L")
        tiles.append(np.asarray(photograph, np.float64))
    # Join the tiles to rows, and the rows to a picture.
    rows = [np.concatenate(tiles[start : start + _TILES], axis=1) for start in range(0, len(tiles), _TILES)]
    return np.concatenate(rows, axis=0)
