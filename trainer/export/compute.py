"""Features of images: of a folder or a prepared set by DALI, as the evaluation reads them, or of single images by Pillow.

Shapes: n images, F features, S the size of the encoder's input in pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from trainer.config.schema import DataConfig
from trainer.data.dali_graph import eval_arrays
from trainer.data.image_probe import decode_rgb
from trainer.data.index import Index, open_index
from trainer.data.index_build import some_names
from trainer.data.loader import CentreCrops, centre_crops
from trainer.data.printable import printable
from trainer.distributed.device import without_tf32
from trainer.errors import InputError
from trainer.export.encoder import Encoder, Preprocess
from trainer.progress import with_progress

Images = str | Path | Sequence[str | Path | Image.Image]
_log = logging.getLogger(__name__)


class ImageFeatures(NamedTuple):
    """Features of the images that could be read, in the order of the folder's index or of the list."""

    features: NDArray[np.float32]  # (n, F)
    names: list[str]  # with control characters escaped; the number of an image in the list that has no file name
    labels: NDArray[np.int64]  # (n,) position in class_names; -1: no label
    class_names: list[str]
    skipped: list[str]  # images that could not be read


def features(encoder: Encoder, images: Images, *, split: str = ".", batch_size: int = 256) -> ImageFeatures:
    """Compute the features of images in float32, on the encoder's device.

    images: a folder (with images at any depth, or a prepared set with `split`), or a list of files and Pillow images. A
        folder is read by DALI, with the same pixels as in an evaluation. A list is read by Pillow, whose pixels differ by 0.2
        of 255 levels on average, see docs/export.md.

    Unreadable images are skipped with a warning. Raises InputError if no image is left, or if a feature is not finite."""
    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size}: give at least 1")
    if isinstance(images, (str, Path)):
        index = _open_folder(Path(images).expanduser(), split)
        names = [index.name(i) for i in range(len(index))]
        labels = np.asarray(index.labels, np.int64)
        class_names = index.class_names
        batches = centre_crops(
            index,
            np.arange(len(index)),
            encoder.preprocess.views,
            # Any share of the images may be unusable: they are skipped and named.
            DataConfig(max_skipped_share=1.0),
            batch_size=batch_size,
            device=encoder.device,
        )
    else:
        # A list has no classes.
        names = [_name_of(item, i) for i, item in enumerate(images)]
        labels = np.full(len(names), -1)
        class_names = []
        batches = _read_list(encoder, images, names, batch_size)

    x, used = _encode(encoder, batches, len(names))
    unused = set(range(len(names))) - set(used)
    skipped = [names[i] for i in sorted(unused)]
    if skipped:
        _log.warning("skipped %d images, which could not be read: %s", len(skipped), some_names(skipped))
    if not used:
        raise InputError("none of the images can be read")
    used_names = [names[i] for i in used]
    _check_finite(x, used_names)
    return ImageFeatures(x, used_names, labels[used], class_names, skipped)


def _open_folder(folder: Path, split: str) -> Index:
    """Open a folder of images or a prepared set. Warns of files that are not images at all, which its index leaves out."""
    index = open_index(folder, split, progress=True)
    count = index.count_unusable_files()
    if count:
        _log.warning("%s lists %d files that are not usable images", index.unusable_files, count)
    return index


def _name_of(item: str | Path | Image.Image, number: int) -> str:
    """Return the name of an image of a list: its file, or its number in the list."""
    if isinstance(item, Image.Image):
        return str(number)
    return printable(str(item))


def _check_finite(x: NDArray[np.float32], names: list[str]) -> None:
    """Raise InputError that names an image with features that are not finite. names: one for each row of x (n, F)."""
    is_finite = np.isfinite(x).all(1)
    wrong = np.flatnonzero(~is_finite)
    if len(wrong):
        first = names[wrong[0]]
        raise InputError(
            f"the features of {len(wrong)} images hold NaN or infinity (first: {first}): the encoder is damaged or does "
            "not fit its preprocessing"
        )


def _read_list(
    encoder: Encoder, images: Sequence[str | Path | Image.Image], names: list[str], batch_size: int
) -> Iterator[CentreCrops]:
    """Yield the centre crops of a list of files and Pillow images, as the loader does for a folder."""
    size = encoder.preprocess.size
    for first in range(0, len(images), batch_size):
        end = min(first + batch_size, len(images))
        asked = np.arange(first, end)
        pixels = torch.zeros(len(asked), size, size, 3, dtype=torch.uint8)
        is_right = np.ones(len(asked), np.bool_)
        for row, i in enumerate(asked.tolist()):
            try:
                crop = centre_crop(_read_image(images[i]), encoder.preprocess)
                pixels[row] = torch.from_numpy(crop)
            except (InputError, OSError) as error:
                # The row stays black, and `_encode` leaves it out.
                is_right[row] = False
                _log.warning("%s: %s", names[i], printable(str(error)))
        channels_first = pixels.permute(0, 3, 1, 2)
        yield CentreCrops(channels_first.to(encoder.device), asked, is_right)


def _read_image(item: str | Path | Image.Image) -> Image.Image:
    """Return an item of a list as an RGB image. Raises InputError or OSError if it cannot be read."""
    if isinstance(item, Image.Image):
        return item.convert("RGB")
    return decode_rgb(Path(item).read_bytes())


def centre_crop(image: Image.Image, preprocess: Preprocess) -> NDArray[np.uint8]:
    """Return the centre crop of an RGB image, (S, S, 3), resized by Pillow in the same window as the evaluation's."""
    start, end = eval_arrays(preprocess.views, np.array([image.height]), np.array([image.width]))
    top, left = start[0].tolist()
    bottom, right = end[0].tolist()
    # The window may end beyond the image by a rounding error.
    box = (
        max(left, 0),
        max(top, 0),
        min(right, image.width),
        min(bottom, image.height),
    )
    method = Image.Resampling[preprocess.interpolation.upper()]
    size = (preprocess.size, preprocess.size)
    return np.array(image.resize(size, method, box))


def _encode(encoder: Encoder, batches: Iterator[CentreCrops], count: int) -> tuple[NDArray[np.float32], list[int]]:
    """Return the features (n, F) and the ids of the images that could be read."""
    # An empty first part gives the right shape if no image can be read.
    parts = [np.zeros((0, encoder.num_features), np.float32)]
    used: list[int] = []
    encoder.eval()
    shown = with_progress(batches, count, "encode images", True, lambda batch: len(batch.image_ids))
    for pixels, asked, is_right in shown:
        # TF32 would give other features on a GPU than on a CPU.
        with torch.inference_mode(), without_tf32():
            x = encoder(pixels).float().cpu().numpy()
        parts.append(x[is_right])
        used += asked[is_right].tolist()
    return np.concatenate(parts), used
