"""Decode single images in the same way everywhere.

A run's DALI graph decodes whole batches. If a batch fails, or if pixels are needed outside of the graph (decode cache,
check-data), the images are decoded here by the same decoder with the same settings, so that an image has the same verdict and
the same pixels everywhere. Pillow decodes the images that DALI refuses but Pillow can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.image_probe import HEAD_BYTES, MAX_PIXELS, decode_rgb, inspect_image
from trainer.errors import InputError


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Decode an image to RGB pixels (H, W, 3) as a run sees them. Raises InputError naming the problem."""
    info = inspect_image(data, max_pixels)
    if info.kind == "bad":
        raise InputError(info.problem)
    pixels = decode_by_dali(data) if info.kind == "direct" else None
    # Pillow decodes the rarer kinds and the images that DALI refuses.
    return np.asarray(decode_rgb(data)) if pixels is None else pixels


def import_torchcodec() -> Any:
    """Return torchcodec's module of decoders. Raises InputError if it cannot be loaded."""
    try:
        from torchcodec import decoders
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(
            f"data.decoder is torchcodec, but it cannot be loaded ({error}): install it by `pip install torchcodec`, or set "
            "data.decoder to dali"
        ) from None
    return decoders


def decode_by_torchcodec(data: bytes) -> NDArray[np.uint8]:
    """Decode an image to RGB pixels (H, W, 3), a usual JPEG by torchcodec and any other as `decode` does.

    Raises InputError naming the problem."""
    if not _suits_torchcodec(data):
        return decode(data)
    try:
        pixels = import_torchcodec().decode_jpeg(data)
    except RuntimeError:
        return decode(data)
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def decode_batch_on_gpu(images: Sequence[NDArray[np.uint8]], device: torch.device) -> list[torch.Tensor]:
    """Decode the bytes of images on a GPU by torchcodec, each to RGB pixels (H, W, 3). They are complete on return.

    Raises InputError for bytes that are not an image."""
    data = [image.tobytes() for image in images]
    usual = [one for one in data if _suits_torchcodec(one)]
    # A stream of its own, so that the training's stream does not wait.
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        try:
            found = iter(import_torchcodec().decode_jpeg(usual, device=device) if usual else ())
        except RuntimeError:  # of one image, which it does not name
            usual, found = [], iter(())
        decoded = []
        for one in data:
            if usual and _suits_torchcodec(one):
                pixels = next(found).permute(1, 2, 0)
            else:
                pixels = torch.from_numpy(decode(one)).to(device)
            decoded.append(pixels.contiguous())
    stream.synchronize()
    return decoded


def _suits_torchcodec(data: bytes) -> bool:
    """Return whether torchcodec decodes an image as stored. It would turn a JPEG by the orientation in its EXIF data."""
    return data.startswith(b"\xff\xd8") and b"Exif\0" not in data[:HEAD_BYTES]


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
