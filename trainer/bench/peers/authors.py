"""Compare the training of W-MSE with the structure of the authors' published code, from the stored images to the weights.

That structure (Ermolov et al., ICML 2021; this is our own code) passes the views through the encoder one by one, whitens slice
by slice and compares pair by pair (`loop_loss`), in torch's default memory format. Its images come from a DataLoader whose
workers transform each view with Pillow. Both sides train in float32 and on one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.bench.implementations import loop_loss
from trainer.bench.loader import endless_loader, loader_sizes
from trainer.bench.peers.loader_torchvision import torchvision_batches
from trainer.bench.timing import Window, interleave, spread
from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.models.encoder import build_encoder, count_features
from trainer.models.projector import Projector
from trainer.setup import build_step

WARMUP_STEPS = 3
QUEUED_STEPS = 6  # whose images the queues of either side may hold while the other side is measured
WINDOWS = 7
LEARNING_RATE = 1e-4
CPU = torch.device("cpu")


def compare_training(config: Config, seconds: float, workers: int) -> dict[str, Any]:
    """Measure both ways to train on the CPU in alternating windows. workers: processes of the peer's DataLoader.

    Each side's threads and workers fill their queues while the other side is measured, so a window lasts many steps.
    Raises InputError for a config that the authors' structure does not compute."""
    if config.method != "wmse" or config.wmse.whitening != "cholesky" or config.optimizer.name != "adam":
        raise InputError("the authors' structure trains W-MSE with Cholesky whitening and Adam: choose such a --config")
    config = replace(config, device="cpu", precision="fp32")
    sides = {"ours": _our_steps(config), "authors": _authors_steps(config, workers)}
    for step in sides.values():
        for _ in range(WARMUP_STEPS):
            step()
    times = interleave({name: _window(step) for name, step in sides.items()}, seconds, num_windows=WINDOWS)
    views = config.data.images_per_step * config.views.num_views
    figures = {name: spread([views / sample for sample in samples]) for name, samples in times.items()}
    return {
        "unit": "views a second",
        "figures": figures,
        "times": {"authors": figures["ours"]["median"] / figures["authors"]["median"]},
        "workers": workers,
        **loader_sizes(config),
    }


def _our_steps(config: Config) -> Callable[[], Any]:
    """Return the function that makes our next step, with our loader."""
    batches = endless_loader(config)
    step = build_step(config, Ranks(), CPU)

    def next_step() -> None:
        batch = next(batches)
        step(batch.views, batch.step, LEARNING_RATE)

    return next_step


def _authors_steps(config: Config, workers: int) -> Callable[[], Tensor]:
    """Return the function that makes the next step in the authors' structure, and returns its loss."""
    networks = SeparateViews(config)
    optimizer = torch.optim.Adam(networks.parameters(), LEARNING_RATE, weight_decay=config.optimizer.weight_decay)
    batches: Iterator[list[Tensor]] = torchvision_batches(config, workers, normalize=True)
    iterations, slice_size = config.wmse.iterations, config.wmse.slice_size

    def next_step() -> Tensor:
        embeddings = networks(next(batches))
        permutations = torch.stack([torch.randperm(config.data.images_per_step) for _ in range(iterations)])
        loss = loop_loss(embeddings, permutations, num_views=config.views.num_views, slice_size=slice_size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return next_step


class SeparateViews(nn.Module):
    """Encoder and projector of a config. The encoder gets one view after the other, so BatchNorm separates the views."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        model = config.model
        self.encoder = build_encoder(model, config.views).to(memory_format=torch.contiguous_format)
        features = count_features(self.encoder)
        self.projector = Projector(model.projector, features, model.projector_hidden, model.embedding_size)

    def forward(self, views: list[Tensor]) -> Tensor:
        """Encode d normalised views, each (N, 3, S, S), as embeddings (d*N, k)."""
        return self.projector(torch.cat([self.encoder(view) for view in views]))


def _window(step: Callable[[], Any]) -> Window:
    """Return the timer of consecutive steps. The first ones are not timed, because their images have been waiting."""

    def window(calls: int) -> float:
        for _ in range(QUEUED_STEPS):
            step()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        return time.perf_counter() - start

    return window
