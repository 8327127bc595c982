"""Precision of losses and statistics."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return float64 unchanged, since tests compare in it, and everything else as float32."""
    return x if x.dtype == torch.float64 else x.float()
