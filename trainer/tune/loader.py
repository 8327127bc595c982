"""The loader of a config, checked by its first batch and timed without what its threads have prepared before."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from trainer.bench.loader import endless_loader
from trainer.bench.timing import Window, synchronize
from trainer.config.schema import Config
from trainer.models.encoder import Normalize


def loader_values(config: Config, device: torch.device) -> list[Tensor]:
    """Return the pixels of the first batch, 0 to 255, on the CPU."""
    batches = endless_loader(config)
    views = next(batches).views.cpu()
    if views.is_floating_point():
        views = Normalize(config.views).undo(views)
    return [views.float()]


def loader_window(config: Config, device: torch.device) -> Window:
    """Return the timer of consecutive batches.

    While another loader is timed, the threads of this one fill its queues. A window takes these batches first."""
    batches = endless_loader(config)
    waiting = config.data.prefetch_batches + config.data.read_ahead_steps + 1

    def window(calls: int) -> float:
        for _ in range(waiting):
            next(batches)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            next(batches)
        synchronize(device)
        return time.perf_counter() - start

    return window
