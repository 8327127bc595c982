"""The loader of a config, checked by its first batch. Each window starts it anew, so that it cannot work ahead in another's."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trainer.bench.loader import endless_loader, restarting_window
from trainer.bench.timing import Window
from trainer.config.schema import Config
from trainer.models.encoder import Normalize


def loader_values(config: Config, _: torch.device) -> list[Tensor]:
    """Return the pixels of the first batch, 0 to 255, on the CPU."""
    batches = endless_loader(config)
    views = next(batches).views.cpu()
    if views.is_floating_point():
        views = Normalize(config.views).undo(views)
    return [views.float()]


def loader_window(config: Config, _: torch.device) -> Window:
    """Return the timer of consecutive batches."""
    return restarting_window(partial(endless_loader, config))
