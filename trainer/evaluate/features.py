"""Features of a split: every usable, labelled image once, one centre crop each, computed by all ranks.

Shapes: n images, F features, S pixels a side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.schema import Config
from trainer.data.dali_graph import eval_recipe
from trainer.data.index import Index
from trainer.data.loader import ViewLoader, eval_requests
from trainer.distributed.device import autocast_dtype
from trainer.distributed.process_group import open_on_all_ranks, require_same
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.models.networks import EncoderNetwork
from trainer.progress import with_progress

_log = logging.getLogger(__name__)
_STATISTICS_BATCHES = 20  # from which an untrained encoder's BatchNorm statistics are estimated
Encode = Callable[[Tensor], Tensor]  # pixels (R, 3, S, S) uint8 -> features (R, F)


@dataclass(frozen=True)
class Features:
    """One split, in the order of its index."""

    x: Tensor  # (n, F) float32, CPU
    labels: Tensor  # (n,) int64
    class_names: list[str]
    left_out: int  # images that could not be read


@dataclass(frozen=True)
class Place:
    """Where features are computed."""

    config: Config
    ranks: Ranks
    device: torch.device


@dataclass(frozen=True)
class Split:
    """A split and its labels; images without one do not count."""

    name: str
    index: Index
    labels: np.ndarray  # (n,) int64, a number into class_names for each image of the index, -1: none
    class_names: list[str]

    @property
    def labelled(self) -> np.ndarray:
        """Ids of the images with a label, int64."""
        return np.flatnonzero(self.labels >= 0)


def open_split(name: str, place: Place) -> Split:
    """Open a split; every rank calls this. Raises InputError if it has no labelled images or fewer than there are ranks."""
    root = place.config.data.root
    index = open_on_all_ranks(place.config.data, name, place.ranks)
    split = Split(name, index, np.asarray(index.labels, np.int64), index.class_names)
    count = len(split.labelled)
    if not count:
        raise InputError(
            f"the split {name!r} in {root} has no labelled images, which the linear probe and k-NN need: name splits that "
            "have labels with --data.probe_split and --data.test_split"
        )
    if count < place.ranks.world_size:
        raise InputError(f"the split {name!r} has {count} labelled images: start no more ranks than that")
    require_same(place.ranks, f"the images of {name}", f"{len(index)} ({index.fingerprint})")
    return split


def extract(encode: Encode, split: Split, place: Place) -> Features:
    """Compute the features of all labelled images of `split`; they are the same on every rank.

    Every rank calls this. Raises InputError if they are not finite."""
    index, labelled = split.index, split.labelled
    own = np.array_split(labelled, place.ranks.world_size)[place.ranks.rank]
    parts, used = [torch.zeros(0)], []
    batches = _batches(index, own, place)
    title = f"encode images of {split.name}"
    for pixels, asked, shown in with_progress(batches, len(own), title, place.ranks.is_first, _batch_size):
        with torch.inference_mode(), _in_precision(place):
            features = encode(pixels).float().cpu()
        right = asked == shown  # the loader puts another image in an unusable one's place: it must not count
        parts.append(features[torch.from_numpy(right)])
        used.append(asked[right])
    x, ids = _gather(torch.cat(parts[1:]), np.concatenate(used), place)
    left_out = len(labelled) - len(ids)
    if left_out:
        _log.warning(
            "%d of %d images of split %s could not be read and do not count", left_out, len(labelled), split.name
        )
    _check_finite(x, ids, split)
    return Features(x, torch.from_numpy(split.labels[ids]), split.class_names, left_out)


def _batch_size(batch: tuple[Tensor, np.ndarray, np.ndarray]) -> int:
    return len(batch[1])


def _check_finite(x: Tensor, ids: np.ndarray, split: Split) -> None:
    wrong = np.flatnonzero(~x.isfinite().all(1).numpy())
    if len(wrong):
        raise InputError(
            f"the features of {len(wrong)} of {len(ids)} images of the split {split.name!r} hold NaN or infinity (first: "
            f"{split.index.name(int(ids[wrong[0]]))}): the encoder is damaged or overflows; try --evaluate.precision fp32 or "
            "an earlier checkpoint"
        )


def encoding_dtype(place: Place) -> torch.dtype | None:
    """The autocast type of encoding; None: float32."""
    return autocast_dtype(replace(place.config, precision=place.config.evaluate.precision), place.device)


@contextmanager
def _in_precision(place: Place) -> Iterator[None]:
    dtype = encoding_dtype(place)
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"  # torch's default on a GPU is TF32, which keeps 10 bits of the 23
    try:
        with torch.autocast(place.device.type, dtype, enabled=dtype is not None):
            yield
    finally:
        convolutions.fp32_precision = before


def trained_encoder(model: EncoderNetwork) -> Encode:
    """Features before the projector; BatchNorm uses its running statistics and leaves them as they are."""
    model.eval()
    return model


def untrained_encoder(model: EncoderNetwork, place: Place) -> Encode:
    """The same for a model that never saw an image: its BatchNorm statistics are first estimated on training images."""
    norms = [m for m in model.encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    data = place.config.data
    index = open_on_all_ranks(data, data.train_split, place.ranks)
    count = min(len(index), _STATISTICS_BATCHES * place.config.evaluate.images_per_batch)
    spread = np.linspace(0, len(index) - 1, count).astype(np.int64)
    model.train()
    for number, (pixels, _, _) in enumerate(_batches(index, spread, place), 1):
        for norm in norms:
            norm.momentum = 1 / number  # a plain average over the batches
        with torch.no_grad():
            model(pixels)
    return trained_encoder(model)


def raw_pixels(pixels: Tensor) -> Tensor:
    """No encoder at all: what the pixels of the centre crop, 0..1, are worth as features."""
    return pixels.flatten(1).float() / 255


def _batches(index: Index, ids: np.ndarray, place: Place) -> Iterator[tuple[Tensor, np.ndarray, np.ndarray]]:
    """(pixels, ids asked for, ids shown) of each batch."""
    size = place.config.evaluate.images_per_batch
    recipe = eval_recipe(place.config.views)
    steps = -(-len(ids) // size)
    loader = ViewLoader(
        index,
        recipe,
        place.config.data,
        eval_requests(recipe, ids, size),
        batch_size=size,
        device=place.device,
        first_step=0,
        end_step=steps,
    )
    for batch in loader:
        yield batch.views, ids[batch.step * size : (batch.step + 1) * size], batch.image_ids


def _gather(x: Tensor, ids: np.ndarray, place: Place) -> tuple[Tensor, np.ndarray]:
    """The rows of all ranks in the order of their ids; ranks may hold different counts."""
    if place.ranks.world_size == 1:
        return x, ids
    counts = torch.zeros(place.ranks.world_size, dtype=torch.int64, device=place.device)
    counts[place.ranks.rank] = len(ids)
    dist.all_reduce(counts)
    most = int(counts.max())
    padded = torch.zeros(most, x.shape[1] + 1, dtype=torch.float64, device=place.device)  # exact for ids and float32
    padded[: len(ids), 0] = torch.from_numpy(ids)
    padded[: len(ids), 1:] = x.to(place.device)
    everyone = [torch.zeros_like(padded) for _ in range(place.ranks.world_size)]
    dist.all_gather(everyone, padded)
    rows = torch.cat([rows[:count] for rows, count in zip(everyone, counts.tolist(), strict=True)]).cpu()
    return rows[:, 1:].float(), rows[:, 0].to(torch.int64).numpy()
