"""Alignment and uniformity of embeddings on the unit sphere.

Wang and Isola, "Understanding Contrastive Representation Learning through Alignment and Uniformity on the Hypersphere",
ICML 2020, section 4.1, and equation 18 for a queue. Shapes: n rows, K keys of a queue, k embedding size.
"""

from __future__ import annotations

from torch import Tensor

from kernels.precision import without_autocast
from trainer.precision import at_least_float32


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Compute the mean squared distance between the rows of x and y, both (n, k) of length 1, a scalar in 0..4."""
    return (at_least_float32(x) - y).square().sum(1).mean()


def uniformity(x: Tensor, queue: Tensor | None = None, *, t: float) -> Tensor:
    """Compute the log of the mean of exp(-t distance^2), at most 0: over the pairs of rows of x, and over x times the queue.

    x: (n, k). queue: (K, k); None: only the pairs of rows of x. All rows have length 1. Float32 (float64 if x is).
    """
    with without_autocast(x.device):
        rows = at_least_float32(x)
        # The squared distance of rows of length 1 is 2 - 2 cos.
        of_pairs = (2 * t * (rows @ rows.T - 1)).exp()
        total = of_pairs.triu(1).sum()
        # Each pair of different rows counts once.
        num_pairs = len(rows) * (len(rows) - 1) // 2
        if queue is not None:
            total = total + (2 * t * (rows @ queue.to(rows.dtype).T - 1)).exp().sum()
            num_pairs += len(rows) * len(queue)
        return (total / num_pairs).log()
