"""Contrastive loss whose negatives are a queue of earlier keys (MoCo).

He et al., "Momentum Contrast", CVPR 2020, equation 1. Shapes: n queries, K keys in the queue, k embedding size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.precision import without_autocast
from trainer.precision import at_least_float32


def queue_contrast_loss(queries: Tensor, keys: Tensor, queue: Tensor, *, temperature: float) -> Tensor:
    """Compute the mean cross-entropy of each query with its key against the queue, a scalar in float32 (float64 if given).

    queries: (n, k). keys: (n, k), the positives, without gradient. queue: (K, k), the negatives. All rows have length 1.
    """
    with without_autocast(queries.device):
        q = at_least_float32(queries)
        positive = (q * keys).sum(1, keepdim=True)
        negative = q @ queue.to(q.dtype).T
        logits = torch.cat([positive, negative], dim=1) / temperature  # (n, 1 + K)
        # The positive is in column 0.
        target = torch.zeros(len(q), dtype=torch.int64, device=q.device)
        return functional.cross_entropy(logits, target)
