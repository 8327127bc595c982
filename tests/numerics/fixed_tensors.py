"""Fixed float64 tensors, for which the values of published implementations are known. Row i and column j count from 1."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def _rows(count: int) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64)[:, None]


_J = torch.arange(1, 5, dtype=torch.float64)

V = torch.sin(1.7 * _rows(64) + 2.3 * _J + 0.31 * _rows(64) * _J)
"""Embeddings of 4 views of 16 images, view-major, (64, 4)."""
TARGETS = torch.cos(1.1 * _rows(64) - 0.7 * _J + 0.17 * _rows(64) * _J)
"""Embeddings of the same views by a target network, (64, 4)."""
QUEUE = normalize(torch.sin(0.9 * _rows(32) + 1.9 * _J * (_rows(32) + 1)), dim=1)
"""Keys of length 1, (32, 4)."""
PROTOTYPES = normalize(torch.cos(2.1 * _rows(6) + 0.6 * _J), dim=1)
"""Prototypes of length 1, (6, 4)."""
