"""The one way in which an image's bytes become pixels, wherever images are decoded one by one.

A run's DALI graph decodes whole batches. Where a batch fails, or pixels are needed outside of the graph (decode cache,
check-data), images are decoded here, by the same decoder with the same settings: the verdict on an image and its pixels
are the same on every path. What DALI refuses and Pillow reads is converted by Pillow (`formats.to_direct`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.data.formats import MAX_PIXELS, decode_rgb, inspect_image
from trainer.errors import InputError


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """(H, W, 3) RGB pixels as a run sees them. Raises InputError naming the problem."""
    info = inspect_image(data, max_pixels)
    if info.kind == "bad":
        raise InputError(info.problem)
    pixels = decode_by_dali(data) if info.kind == "direct" else None
    return np.asarray(decode_rgb(data)) if pixels is None else pixels


def decode_by_dali(data: bytes, *, on_gpu: bool = False) -> NDArray[np.uint8] | None:
    """The same for bytes whose structure `inspect_image` calls direct, by DALI alone; None where it refuses them."""
    from nvidia.dali.experimental.dynamic import decoders  # takes a second

    encoded, device = np.frombuffer(data, np.uint8), "gpu" if on_gpu else "cpu"
    try:
        return np.asarray(decoders.image(encoded, device=device, adjust_orientation=False).cpu())
    except RuntimeError:
        return None
