"""Images that the tests of plan, colour and views draw from."""

import io

import numpy as np
from PIL import Image


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
