"""Choose a share of the images of each class, by the seed of the run."""

from __future__ import annotations

import numpy as np

from trainer.data.plan import epoch_order
from trainer.evaluate.features import Split


def stratified_share(split: Split, share: float, seed: int, *, at_least: int = 1) -> np.ndarray:
    """Return the ids (m,), in increasing order, of `share` of the labelled images of each class.

    at_least: number of images of each class that are taken if the share is smaller.
    With the same seed, a smaller share is a part of a larger one. The ids do not depend on the number of ranks."""
    # The first images of each class in one fixed random order: a larger share then begins with the smaller one.
    order = epoch_order(seed, 0, len(split.labels))
    labels = split.labels[order]
    chosen = []
    for label in np.unique(labels[labels >= 0]):
        of_class = order[labels == label]
        count = max(at_least, round(share * len(of_class)))
        chosen.append(of_class[:count])
    return np.sort(np.concatenate(chosen))
