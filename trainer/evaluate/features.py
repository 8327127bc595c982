"""Features of a split: one centre crop of every usable, labelled image, computed by all ranks together.

Shapes: n images, F features, S the size of a view in pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.schema import Config
from trainer.data.index import Index
from trainer.data.loader import CentreCrops, centre_crops
from trainer.distributed.device import autocast_dtype, without_tf32
from trainer.distributed.process_group import open_on_all_ranks, require_same
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.models.networks import EncoderNetwork
from trainer.progress import with_progress

_log = logging.getLogger(__name__)
_STATISTICS_BATCHES = 20  # batches to estimate the BatchNorm statistics of an untrained encoder
Encode = Callable[[Tensor], Tensor]  # pixels (R, 3, S, S) uint8 -> features (R, F)


class NotFiniteError(InputError):
    """Features of an image hold NaN or infinity."""


@dataclass(frozen=True)
class Features:
    """Features of one split, in the order of its index."""

    x: Tensor  # (n, F) float32, CPU
    labels: Tensor  # (n,) int64
    class_names: list[str]  # by label
    skipped: int  # images that could not be read
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # (n,) in the index of the split


@dataclass(frozen=True)
class Place:
    """Config, rank and device of an evaluation."""

    config: Config
    ranks: Ranks
    device: torch.device


@dataclass(frozen=True)
class Split:
    """Split of a data set and its labels. Images without a label do not count."""

    name: str
    index: Index
    labels: np.ndarray  # (n,) int64, position in class_names for each image of the index; -1: no label
    class_names: list[str]

    @property
    def labelled(self) -> np.ndarray:
        """The ids of the images with a label, int64."""
        return np.flatnonzero(self.labels >= 0)

    def only(self, ids: np.ndarray) -> Split:
        """Return the split in which only the images `ids` have labels, so that only they count."""
        labels = np.full_like(self.labels, -1)
        labels[ids] = self.labels[ids]
        return replace(self, labels=labels)


def open_split(name: str, place: Place) -> Split:
    """Open a split; every rank calls this. Raises InputError if it has no labelled images or fewer than there are ranks."""
    root = place.config.data.root
    index = open_on_all_ranks(place.config.data, name, place.ranks)
    labels = np.asarray(index.labels, np.int64)
    # Images without a label take no part in the evaluation.
    split = Split(
        name=name,
        index=index,
        labels=labels,
        class_names=index.class_names,
    )
    count = len(split.labelled)
    if not count:
        raise InputError(
            f"the split {name!r} in {root} has no labelled images, which the linear probe and k-NN need: choose "
            "splits with labels by --data.probe_split and --data.test_split"
        )
    if count < place.ranks.world_size:
        raise InputError(
            f"the split {name!r} in {root} has {count} labelled images for {place.ranks.world_size} ranks: "
            f"start at most {count} ranks"
        )
    require_same(place.ranks, f"the images of {name}", f"{len(index)} ({index.fingerprint})")
    return split


def extract(encode: Encode, split: Split, place: Place, *, to_all: bool = True) -> Features:
    """Compute the features of all labelled images of `split`. All ranks share the work.

    to_all: whether all ranks get all features. If not, rank 0 gets them, and the others only those that they computed: the
    features of ImageNet take 10 GB of memory on each rank.
    Every rank calls this. Raises InputError if a feature is not finite."""
    labelled = split.labelled
    own = np.array_split(labelled, place.ranks.world_size)[place.ranks.rank]

    # Encode this rank's images, batch by batch.
    parts, used = [], []
    batches = _batches(split.index, own, place)
    title = f"encode images of {split.name}"
    for pixels, asked, is_right in with_progress(batches, len(own), title, place.ranks.is_first, _batch_size):
        with torch.inference_mode(), in_precision(place):
            features = encode(pixels).float().cpu()
        # The loader shows another image instead of an unusable one, which does not count here.
        parts.append(features[torch.from_numpy(is_right)])
        used.append(asked[is_right])

    # Join the ids of all ranks, each with whether its features are finite, so that all ranks raise the same error.
    x = torch.cat(parts)
    own_ids = np.concatenate(used)
    own_finite = x.isfinite().all(1).long()
    checked = torch.stack([torch.from_numpy(own_ids), own_finite], dim=1)
    ids, is_finite = _join(checked, place, to_all=True).T.numpy()
    _check_finite(is_finite, ids, split)
    skipped = len(labelled) - len(ids)
    if skipped:
        _log.warning(
            "skipped %d of %d images of split %s, because they could not be read",
            skipped,
            len(labelled),
            split.name,
        )

    # Ids and labels of the rows that this rank gets.
    if to_all or place.ranks.is_first:
        own_ids = ids
    return Features(
        x=_join(x, place, to_all=to_all),
        labels=torch.from_numpy(split.labels[own_ids]),
        class_names=split.class_names,
        skipped=skipped,
        ids=torch.from_numpy(own_ids.copy()),
    )


def _batch_size(batch: CentreCrops) -> int:
    return len(batch.image_ids)


def _check_finite(is_finite: np.ndarray, ids: np.ndarray, split: Split) -> None:
    """Raise InputError that names an image with features that are not finite."""
    wrong = np.flatnonzero(is_finite == 0)
    if len(wrong):
        first_id = int(ids[wrong[0]])
        first = split.index.name(first_id)
        raise NotFiniteError(
            f"the features of {len(wrong)} of {len(ids)} images of the split {split.name!r} hold NaN or infinity "
            f"(first: {first}). The encoder is damaged or overflows: try --evaluate.precision fp32 or an earlier checkpoint"
        )


def encoding_dtype(place: Place) -> torch.dtype | None:
    """Return the autocast type for encoding; None: float32."""
    config = replace(place.config, precision=place.config.evaluate.precision)
    return autocast_dtype(config, place.device)


@contextmanager
def in_precision(place: Place) -> Iterator[None]:
    """Encode in the precision of `evaluate.precision` while the block runs, and never in TF32."""
    dtype = encoding_dtype(place)
    with without_tf32(), torch.autocast(place.device.type, dtype, enabled=dtype is not None):
        yield


def trained_encoder(model: EncoderNetwork) -> Encode:
    """Return the encoder of `model` in evaluation mode: BatchNorm uses its running statistics and does not change them."""
    model.eval()
    return model


def untrained_encoder(model: EncoderNetwork, place: Place) -> Encode:
    """Return the encoder of an untrained `model`, after its BatchNorm statistics are estimated on training images."""
    norms = [m for m in model.encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    data = place.config.data
    index = open_on_all_ranks(data, data.train_split, place.ranks)
    count = min(len(index), _STATISTICS_BATCHES * place.config.evaluate.images_per_batch)
    # Spread the images evenly over the split, which may be sorted by class.
    spread = evenly_spread(len(index), count)
    model.train()
    for number, (pixels, _, _) in enumerate(_batches(index, spread, place), 1):
        for norm in norms:
            norm.momentum = 1 / number  # gives the plain average over all batches
        with torch.no_grad():
            model(pixels)
    return trained_encoder(model)


def evenly_spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0..count-1, evenly spread, int64."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def raw_pixels(pixels: Tensor) -> Tensor:
    """Return the pixels of the centre crop, scaled to 0..1, as features: a baseline without an encoder."""
    return pixels.flatten(1).float() / 255


def _batches(index: Index, ids: np.ndarray, place: Place) -> Iterator[CentreCrops]:
    config = place.config
    size = config.evaluate.images_per_batch
    return centre_crops(index, ids, config.views, config.data, batch_size=size, device=place.device)


def _join(rows: Tensor, place: Place, *, to_all: bool) -> Tensor:
    """Return the rows (n, ...) of all ranks, one rank after the other, on the CPU. Ranks may hold different counts.

    to_all: False: only rank 0 gets all rows, and the others get their own again. Every rank calls this."""
    ranks = place.ranks
    if ranks.world_size == 1:
        return rows
    # Each rank fills in its count; the sum over ranks joins them.
    counts = torch.zeros(ranks.world_size, dtype=torch.int64, device=place.device)
    counts[ranks.rank] = len(rows)
    dist.all_reduce(counts)

    # Pad to the largest count, because the collectives need equal shapes.
    largest_count = int(counts.max())
    padded = torch.zeros(largest_count, *rows.shape[1:], dtype=rows.dtype, device=place.device)
    padded[: len(rows)] = rows.to(place.device)
    if to_all:
        of_ranks = [torch.empty_like(padded) for _ in range(ranks.world_size)]
        dist.all_gather(of_ranks, padded)
    else:
        of_ranks = [torch.empty_like(padded) for _ in range(ranks.world_size)] if ranks.is_first else []
        dist.gather(padded, of_ranks or None, dst=0)
        if not ranks.is_first:
            return rows
    parts = [part[:count].cpu() for part, count in zip(of_ranks, counts.tolist(), strict=True)]
    return torch.cat(parts)
