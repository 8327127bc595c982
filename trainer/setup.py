"""Build the parts of a run: set, plan, model, optimizer, step, loader. The loop drives them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.backends import why_not
from trainer.config.schema import Config
from trainer.data.decode_cache import SHARED_MEMORY, DecodeCache, check_cache_size, decoded_bytes
from trainer.data.index import Index
from trainer.data.loader import ViewLoader, train_requests
from trainer.data.plan import Planner, Rows, slice_permutations
from trainer.distributed.cores import own_cores
from trainer.distributed.device import autocast_dtype, compiles
from trainer.distributed.geometry import micro_batches, own_rows, rows_together, slice_group_size
from trainer.distributed.process_group import (
    make_batch_norm_group,
    make_slice_group,
    one_rank_a_node_first,
    open_on_all_ranks,
    require_same,
    wrap_model,
)
from trainer.distributed.ranks import Ranks, job_key
from trainer.errors import InputError
from trainer.files import atomic_write
from trainer.models.networks import build_model
from trainer.optimizer import build_optimizer
from trainer.run.checkpoint import load_encoder
from trainer.run.checkpoint_files import list_checkpoints
from trainer.run.faults import FaultCounter
from trainer.schedule import Schedule, build_schedule, side_steps
from trainer.step import TrainStep
from trainer.tools.run_plan import check_set_size

_log = logging.getLogger(__name__)
_INDUCTOR_MODES = {  # (autotune, cuda_graphs)
    (False, False): None,
    (False, True): "reduce-overhead",
    (True, False): "max-autotune-no-cudagraphs",
    (True, True): "max-autotune",
}


@dataclass
class Run:
    """Everything that a run is made of, on one rank."""

    config: Config
    ranks: Ranks
    device: torch.device
    run_dir: Path
    index: Index
    planner: Planner
    schedule: Schedule
    model: nn.Module
    """The plain model; `step` holds the wrapped one."""
    optimizer: torch.optim.Optimizer
    step: TrainStep
    group_rows: Rows
    """Consecutive images of a step that this rank's slice group holds."""
    cache: DecodeCache | None = None
    """Decoded images that the ranks of a node share."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each setting comes from: a file, the command line or the default; empty if that is not known."""

    def __post_init__(self) -> None:
        self._identity = torch.arange(self.group_rows.count, device=self.device)[None]

    @property
    def end_step(self) -> int:
        """Updates after which this call of the run ends."""
        return min(self.config.max_steps or self.schedule.total_steps, self.schedule.total_steps)

    @property
    def checkpoints(self) -> Path:
        """Their folder."""
        return self.run_dir / "checkpoints"

    @property
    def quarantine(self) -> Path:
        """The file that names images which could not be used."""
        return self.run_dir / "quarantine.jsonl"

    def fault_counter(self) -> FaultCounter:
        """Return the counter of failed steps; only the first rank's logs."""
        group_size = self.group_rows.count // self.planner.rows.count
        most, num_views = self.config.loss.max_failed_steps, self.config.views.num_views
        scales_loss = self.step.loss_scale is not None
        return FaultCounter(most, num_views, self.ranks, group_size, scales_loss=scales_loss)

    def loader(self, first_step: int) -> ViewLoader:
        """The batches from `first_step` on."""
        sides = side_steps(self.config, self.planner.steps_per_epoch)
        return ViewLoader(
            self.index,
            self.config.views,
            self.config.data,
            train_requests(self.planner, sides),
            batch_size=self.planner.rows.count,
            device=self.device,
            first_step=first_step,
            end_step=self.end_step,
            sides=sides,
            cache=self.cache,
            quarantine=self.quarantine,
            rank=self.ranks.rank,
        )

    def permutations(self, step: int) -> Tensor:
        """The slicing orders of this rank's slice group, (iterations, images of the group) int64, on the device."""
        loss, rows = self.config.loss, self.group_rows
        if loss.iterations == 1:
            return self._identity
        orders = slice_permutations(
            self.config.seed, step, self.config.data.images_per_step, loss.iterations, loss.permutation_block
        )
        own = orders[:, rows.first : rows.first + rows.count] - rows.first
        pinned = torch.from_numpy(own).pin_memory() if self.device.type == "cuda" else torch.from_numpy(own)
        return pinned.to(self.device, non_blocking=True)


def set_up(config: Config, ranks: Ranks, device: torch.device, run_dir: Path) -> Run:
    """Build a run before its first step. Raises InputError if the settings don't fit the set or the number of ranks."""
    check_backend(config, device)
    index = images_of_run(open_on_all_ranks(config.data, config.data.train_split, ranks), config, run_dir, ranks)
    check_set_size(config, len(index), warn=ranks.is_first)
    require_same(ranks, "the images of " + config.data.train_split, f"{len(index)} ({index.fingerprint})")
    rows = own_rows(ranks, config.data.images_per_step, rows_together(config))
    planner = Planner(
        config.views,
        seed=config.seed,
        num_images=len(index),
        images_per_step=config.data.images_per_step,
        rows=rows,
    )
    group_size = slice_group_size(rows.count, ranks.world_size, rows_together(config))
    parts = micro_batches(config, rows.count)
    model = build_model(config, ranks, make_batch_norm_group(config, ranks, device)).to(device)
    if config.init_from:
        load_encoder(model, Path(config.init_from))
        _log.info("encoder from %s, fresh projector", config.init_from)
    optimizer = build_optimizer(model, config.optimizer, device)
    if compiles(config, device):
        compile_model(model, config, device)
    group_first = ranks.rank // group_size * group_size * rows.count
    step = TrainStep(
        wrap_model(model, ranks, device, compression=config.gradient_compression, accumulates=parts > 1),
        optimizer,
        config.loss,
        num_views=config.views.num_views,
        autocast_dtype=autocast_dtype(config, device),
        ranks=ranks,
        slice_group=make_slice_group(group_size, config, ranks, device),
        accumulation_steps=parts,
    )
    return Run(
        config=config,
        ranks=ranks,
        device=device,
        run_dir=run_dir,
        index=index,
        planner=planner,
        schedule=build_schedule(config, planner.steps_per_epoch),
        model=model,
        optimizer=optimizer,
        step=step,
        group_rows=Rows(group_first, group_size * rows.count),
        cache=open_cache(config, index, ranks),
    )


def check_backend(config: Config, device: torch.device) -> None:
    """Raise InputError if the backend of whitening or optimizer can't do on this device what the settings ask for."""
    loss, optimizer = config.loss, config.optimizer
    for key, backend, reason in (
        ("loss", loss.backend, why_not(loss.backend, device.type, config.model.embedding_size, loss.float64_factor)),
        ("optimizer", optimizer.backend, why_not(optimizer.backend, device.type, size=1, in_float64=False)),
    ):
        if reason:
            raise InputError(f"{key}.backend {backend} {reason}: set {key}.backend to auto or torch")


def open_cache(config: Config, index: Index, ranks: Ranks) -> DecodeCache | None:
    """Open the node's memory for decoded images, if the settings ask for it. Raises InputError if the set does not fit."""
    if not config.data.decode_cache_gib:
        return None
    check_cache_size(index, config.data.decode_cache_gib)
    if ranks.is_first:
        _log.info("reserving %.2f GiB of shared memory for decoded images", decoded_bytes(index) / 2**30)
    job = (job_key() or os.environ.get("MASTER_PORT", "")) if ranks.world_size > 1 else str(os.getpid())
    path = SHARED_MEMORY / f"wmse_{os.getuid()}_{index.fingerprint}_{job}"
    try:
        cache = one_rank_a_node_first(ranks, lambda: DecodeCache(index, path, create=ranks.local_rank == 0))
        if ranks.world_size > 1:
            dist.barrier()
    finally:
        if ranks.local_rank == 0:  # also where another rank failed: no memory is left behind
            with suppress(OSError):  # the first error is the one to report
                path.unlink()
    return cache


def images_of_run(found: Index, config: Config, run_dir: Path, ranks: Ranks) -> Index:
    """Return the images that the run began with, even if files of an image folder were added or removed since.

    Ids, order and labels stay, and missing files are replaced like other unusable images. allow_changes takes those found
    now."""
    kept = run_dir / "images.index"
    if kept.exists() and list_checkpoints(run_dir / "checkpoints") and not config.allow_changes:
        begun = Index(kept, found.root)
        if found.is_folder and begun.split == found.split and begun.fingerprint != found.fingerprint:
            if ranks.is_first:
                _log.warning(
                    "%s has changed since the run began (%d -> %d images): continuing with those it began with and "
                    "replacing those that are missing. --allow_changes true takes what is there now",
                    found.root,
                    len(begun),
                    len(found),
                )
            return begun
    elif ranks.is_first and found.is_folder:
        with atomic_write(kept) as file:
            file.write(found.path.read_bytes())
    return found


def compile_model(
    model: nn.Module, config: Config, device: torch.device, *, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile in place, before DDP wraps it, so that names stay plain; the first step compiles.

    A graph break is an error, since it would silently cost what compiling gains. Shapes are fixed: each size of the views is
    compiled."""
    import torch._functorch.config
    import torch._inductor.config

    on_gpu = device.type == "cuda"
    mode = _INDUCTOR_MODES[config.autotune and on_gpu, config.cuda_graphs and on_gpu]
    # both are global to the process: torch has no option for one model
    torch._functorch.config.activation_memory_budget = config.model.activation_memory_budget
    torch._inductor.config.compile_threads = own_cores()  # its default is up to 32 processes for each rank
    model.compile(fullgraph=True, dynamic=False, backend=backend, mode=mode if backend == "inductor" else None)
