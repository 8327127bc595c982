"""Build the parts of a run: images, step (with method and optimizer), plan. The loop uses them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer import optimizer
from trainer.config.schema import Config
from trainer.data.decode_cache import DecodeCache
from trainer.data.index import Index
from trainer.data.loader import ViewLoader, train_requests
from trainer.data.plan import Planner
from trainer.data.run_images import images_of_run, open_cache
from trainer.distributed.device import autocast_dtype, compiles, views_dtype
from trainer.distributed.geometry import (
    check_set_size,
    images_of_rank,
    indivisible_images,
    loss_group_size,
    micro_batches,
)
from trainer.distributed.process_group import (
    make_batch_norm_group,
    make_loss_group,
    open_on_all_ranks,
    require_same,
    wrap_model,
)
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.models import fused_batch_norm
from trainer.models.compile import compile_networks
from trainer.models.networks import EncoderNetwork
from trainer.models.online_probe import OnlineProbe
from trainer.run.checkpoint import load_encoder
from trainer.run.faults import FaultCounter
from trainer.schedule import Schedule, build_schedule, peak_learning_rate, size_steps
from trainer.step import TrainStep

_log = logging.getLogger(__name__)


@dataclass
class Run:
    """Parts of a run on one rank."""

    config: Config
    ranks: Ranks
    device: torch.device
    run_dir: Path
    index: Index
    planner: Planner
    schedule: Schedule
    step: TrainStep
    cache: DecodeCache | None = None
    """Cache of decoded images, which the ranks of a node share."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each setting: a file, the command line or the default; empty if unknown."""

    def labels(self, image_ids: NDArray[np.int64]) -> torch.Tensor | None:
        """Return the labels (N,) int64 of images, on the device, -1: no label; None without an online probe."""
        if self.step.online_probe is None:
            return None
        labels = torch.from_numpy(self.index.labels[image_ids].astype(np.int64))
        if self.device.type == "cuda":
            # A copy from pageable memory would wait for the device.
            return labels.pin_memory().to(self.device, non_blocking=True)
        return labels

    @property
    def end_step(self) -> int:
        """Number of updates after which this call of the run ends."""
        return min(self.config.max_steps or self.schedule.total_steps, self.schedule.total_steps)

    @property
    def checkpoints(self) -> Path:
        """Checkpoint directory."""
        return self.run_dir / "checkpoints"

    @property
    def quarantine(self) -> Path:
        """File with the names of skipped images."""
        return self.run_dir / "quarantine.jsonl"


def set_up(config: Config, ranks: Ranks, device: torch.device, run_dir: Path) -> Run:
    """Build all parts of a run before its first step. Every rank calls this.

    Raises InputError if the settings do not fit the data set or the number of ranks."""
    # Check the settings first, because opening the images may take minutes.
    check_device(config, device)
    # Open the images, and check that all ranks see the same.
    split = config.data.train_split
    full_index = open_on_all_ranks(config.data, split, ranks)
    index = images_of_run(full_index, config, run_dir, ranks)
    check_set_size(config, len(index), warn=ranks.is_first)
    require_same(ranks, f"the images of {split}", f"{len(index)} ({index.fingerprint})")

    # Some methods need the length of the run, for example for a momentum.
    schedule = build_schedule(config, len(index) // config.data.images_per_step)
    step = build_step(config, ranks, device, index.class_names, total_steps=schedule.total_steps)
    if config.init_from:
        load_encoder(step.method.networks, Path(config.init_from))
        step.method.encoder_loaded()
        _log.info("loaded the encoder of %s; everything else starts fresh", config.init_from)
    planner = Planner(
        config.views,
        seed=config.seed,
        num_images=len(index),
        images_per_step=config.data.images_per_step,
        images=step.images,
    )
    return Run(
        config=config,
        ranks=ranks,
        device=device,
        run_dir=run_dir,
        index=index,
        planner=planner,
        schedule=schedule,
        step=step,
        cache=open_cache(config, index, ranks),
    )


def check_device(config: Config, device: torch.device) -> None:
    """Raise InputError if method, optimizer, BatchNorm or augmentation do not support the settings on this device."""
    config.method_settings.check_device(config, device)
    optimizer.check_device(config.optimizer, device)
    fused_batch_norm.check_device(config.model, device)
    views_dtype(config, device)


def build_step(
    config: Config, ranks: Ranks, device: torch.device, class_names: Sequence[str] = (), *, total_steps: int = 1
) -> TrainStep:
    """Build the method with the weights of the seed, its optimizer, and the step. Every rank calls this.

    class_names: of the training images, for the online probe. total_steps: see `MethodContext`.

    Raises InputError if the settings do not fit the device or the number of ranks."""
    # Divide the images of a step among ranks, loss groups and micro-batches.
    unit = indivisible_images(config)
    images = images_of_rank(ranks, config.data.images_per_step, unit)
    group_size = loss_group_size(images.count, ranks.world_size, unit)
    num_micro_batches = micro_batches(config, images.count)

    # Every rank draws the same initial weights, because all use the same seed.
    method = config.method_settings.build(
        config,
        ranks,
        device,
        total_steps=total_steps,
        loss_group=make_loss_group(group_size, config, ranks, device),
        batch_norm_group=make_batch_norm_group(config, ranks, device),
    )
    online_probe = _online_probe(config, class_names, method.networks, ranks, device)
    # Compile before DDP wraps the networks.
    if compiles(config, device):
        compile_networks(method.networks, config, device)
    wrapped = wrap_model(
        method.networks,
        ranks,
        device,
        compression=config.gradient_compression,
        accumulates=num_micro_batches > 1,
        fixed_buckets=config.deterministic,
    )
    return TrainStep(
        method,
        optimizer.build_optimizer(
            method.networks,
            config.optimizer,
            device,
            constant_rate=method.constant_rate,
            peak=peak_learning_rate(config),
        ),
        num_views=config.views.num_views,
        images=images,
        ranks=ranks,
        wrapped=wrapped,
        autocast_dtype=autocast_dtype(config, device),
        micro_batches=num_micro_batches,
        online_probe=online_probe,
    )


def _online_probe(
    config: Config, class_names: Sequence[str], networks: Any, ranks: Ranks, device: torch.device
) -> OnlineProbe | None:
    """Build the online probe, and let the encoder keep its features; None if it is not enabled."""
    if not config.online_probe.enabled:
        return None
    # With one class every guess is right.
    if len(class_names) < 2:
        raise InputError(
            "online_probe.enabled is true, but the training images have no classes: set it to false, or sort the images into "
            "a folder for each class"
        )
    if not isinstance(networks, EncoderNetwork):
        raise InputError(f"online_probe.enabled is true, but {config.method} does not keep features: set it to false")
    # Only a run with the probe keeps them, because they take memory in each step.
    networks.keeps_features = True
    return OnlineProbe(
        networks.num_features,
        len(class_names),
        views_per_step=config.data.images_per_step * config.views.num_views,
        learning_rate=config.online_probe.learning_rate,
        ranks=ranks,
        device=device,
    )


def build_fault_counter(run: Run) -> FaultCounter:
    """Build the counter of skipped updates; only rank 0 logs."""
    # The counter names all ranks of a loss group, because they fail together.
    unit = indivisible_images(run.config)
    group_size = loss_group_size(run.planner.images.count, run.ranks.world_size, unit)
    return FaultCounter(
        run.config.max_skipped_steps,
        run.step.method.checks,
        run.ranks,
        group_size,
        scales_loss=run.step.grad_scaler is not None,
        remedy=run.step.method.remedy,
    )


def build_loader(run: Run, first_step: int) -> ViewLoader:
    """Build the loader of the batches from `first_step` on."""
    sizes = size_steps(run.config, run.planner.steps_per_epoch)
    return ViewLoader(
        run.index,
        run.config.views,
        run.config.data,
        train_requests(run.planner, sizes, with_digest=True),
        batch_size=run.planner.images.count,
        device=run.device,
        first_step=first_step,
        end_step=run.end_step,
        sizes=sizes,
        cache=run.cache,
        quarantine=run.quarantine,
        rank=run.ranks.rank,
        views_dtype=views_dtype(run.config, run.device),
    )
