"""Base of methods with a key network and a queue of keys of earlier steps (He et al., CVPR 2020).

Shapes: N images of this rank or micro-batch, q = N queries (2N if symmetric), K keys in the queue, k embedding size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainer.config.schema import Config
from trainer.distributed.gather import join_rows
from trainer.distributed.ranks import ImageRange
from trainer.methods.method import Method, MethodContext
from trainer.methods.moco.settings import QueueSettings
from trainer.models.networks import EncoderProjector, build_networks
from trainer.models.target import TargetNetwork


class QueueOutput(NamedTuple):
    """Embeddings of queries and their keys, (q, k) each."""

    queries: Tensor
    keys: Tensor  # without gradient


class QueueNetworks(EncoderProjector):
    """Encoder and projector of the queries, those of the keys, and the queue."""

    queue: Tensor
    """Keys of earlier steps, (K, k), of length 1. It starts with random directions."""

    def __init__(self, config: Config, *batch_norm: Any, settings: QueueSettings, symmetric: bool) -> None:
        super().__init__(config, *batch_norm, batch_norm_rows=settings.batch_norm_rows)
        self.target = TargetNetwork(self)
        # Random directions are negatives too, until the keys of the first steps have replaced them.
        queue = torch.randn(settings.queue_size, config.model.embedding_size)
        self.register_buffer("queue", functional.normalize(queue, dim=1))
        self.symmetric = symmetric
        self.rows_of_group = settings.batch_norm_rows
        self.groups_of_block = settings.shuffle_images // settings.batch_norm_rows

    def forward(self, pixels: Tensor) -> QueueOutput:
        """Encode pixels (2N, 3, S, S) uint8, channels_last: queries of view 0, and keys of view 1."""
        images = self.normalize(pixels)
        first, second = images.chunk(2)
        # With `symmetric` each view gives queries, and the other view their keys.
        of_queries = images if self.symmetric else first
        # The key of a query is the same image in the other view.
        of_keys = torch.cat([second, first]) if self.symmetric else second
        queries = self.embed(of_queries)
        order = self.shuffled(len(of_keys), pixels.device)
        shuffled = of_keys[order].contiguous(memory_format=torch.channels_last)
        # Exchanging groups and parts a second time restores the order.
        return QueueOutput(queries, self.target(shuffled)[order])

    def shuffled(self, count: int, device: torch.device) -> Tensor:
        """Return an order of `count` rows in which each BatchNorm group has an equal part of each group of its block.

        The order of the images in an epoch is random, so a fixed order shuffles as well as a random one. It is its own
        inverse. (count,) int64."""
        rows = torch.arange(count, device=device)
        parts = rows.view(-1, self.groups_of_block, self.groups_of_block, self.rows_of_group // self.groups_of_block)
        return parts.transpose(1, 2).flatten()


class QueueMethod(Method):
    """Query network, key network and queue. The queue is the same on all ranks."""

    networks: QueueNetworks

    def __init__(self, context: MethodContext, settings: QueueSettings, *, symmetric: bool = False) -> None:
        """symmetric: whether each view gives queries and keys."""
        self.networks = build_networks(QueueNetworks, context, settings=settings, symmetric=symmetric)
        self._momentum = settings.momentum
        self._has_ranks = context.ranks.world_size > 1
        self._new_keys: list[Tensor] = []  # of the micro-batches of this step, (views, n, k) each

    def compare(self, outputs: QueueOutput, images: ImageRange) -> tuple[Tensor, Tensor]:
        """Scale queries and keys to length 1, and keep the keys for the queue."""
        queries = functional.normalize(outputs.queries, dim=1)
        keys = functional.normalize(outputs.keys, dim=1)
        self._new_keys.append(keys.unflatten(0, (-1, images.count)))
        return queries, keys

    def encoder_loaded(self) -> None:
        """Start the key network as a copy of the loaded encoder."""
        self.networks.target.copy_from(self.networks)

    def after_update(self, step: int, skipped: Tensor) -> None:
        """Move the key network, and replace the oldest keys of the queue by those of this step, in the order of images."""
        self.networks.target.follow(self.networks, self._momentum)
        # The micro-batches hold consecutive images of each view, so joining them restores the order of the step.
        keys = torch.cat(self._new_keys, dim=1)
        self._new_keys = []
        num_views = len(keys)
        keys = keys.flatten(0, 1)
        if self._has_ranks:
            keys = join_rows(keys, num_views, None)
        # The position follows from the step, so it needs no state.
        queue = self.networks.queue
        first = step * len(keys) % len(queue)
        queue[first : first + len(keys)] = keys
