"""Decode single images in the same way everywhere.

A run's DALI graph decodes whole batches. If a batch fails, or if pixels are needed outside of the graph (decode cache,
check-data), the images are decoded here by the same decoder with the same settings, so that an image has the same verdict and
the same pixels everywhere. Pillow decodes the images that DALI refuses but Pillow can read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.data.image_probe import MAX_PIXELS, decode_rgb, inspect_image
from trainer.errors import InputError


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Decode an image to RGB pixels (H, W, 3) as a run sees them. Raises InputError naming the problem."""
    info = inspect_image(data, max_pixels)
    if info.kind == "bad":
        raise InputError(info.problem)
    pixels = decode_by_dali(data) if info.kind == "direct" else None
    # Pillow decodes the rarer kinds and the images that DALI refuses.
    return np.asarray(decode_rgb(data)) if pixels is None else pixels


def decode_by_dali(data: bytes, *, on_gpu: bool = False) -> NDArray[np.uint8] | None:
    """Decode bytes that `inspect_image` calls direct by DALI alone, to (H, W, 3). Return None if DALI refuses them."""
    from nvidia.dali.experimental.dynamic import decoders  # takes a second

    # The settings must equal those of `dali_graph.decode`.
    encoded = np.frombuffer(data, np.uint8)
    device = "gpu" if on_gpu else "cpu"
    try:
        pixels = decoders.image(encoded, device=device, adjust_orientation=False)
        return np.asarray(pixels.cpu())
    except RuntimeError:
        return None
