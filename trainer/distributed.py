"""Collective work of the ranks: process group, DDP, slice groups, opening a split together."""

from __future__ import annotations

import inspect
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from trainer.cluster.ranks import Ranks
from trainer.cluster.rendezvous import compare_ranks, meet
from trainer.config import Config, DataConfig
from trainer.data.index import Index, open_images
from trainer.errors import InputError

T = TypeVar("T")


@contextmanager
def process_group(
    ranks: Ranks,
    device: torch.device,
    timeout_minutes: float,
    *,
    facts: Mapping[str, Any] | None = None,
    first: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Open the group of all ranks while the block runs; there is none if this process is alone.

    facts: what must be the same on all ranks, by name. first: called on rank 0 when all ranks are there, before any goes on;
    an InputError or TrainingFailedError that it raises is raised by every rank.
    """
    if ranks.world_size == 1:
        first()
        yield
        return
    on_gpu = device.type == "cuda"
    timeout = _collective_timeout(timeout_minutes)
    began = time.monotonic()
    store = meet(ranks, timeout)
    # the start as a whole waits no longer than the time-out
    left = max(timeout - timedelta(seconds=time.monotonic() - began), timedelta(seconds=1))
    own_gpu = {"gpu": str(torch.cuda.get_device_properties(device).uuid)} if on_gpu else {}
    compare_ranks(store, ranks, {**(facts or {}), "device": device.type, **own_gpu}, left, first)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or late; the cause is then in that rank's log lines."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def make_slice_group(size: int, ranks: Ranks, timeout_minutes: float) -> Any:
    """Return the process group of this rank's neighbours; None if it has none. Every rank calls this."""
    if size == 1:
        return None
    timeout = _collective_timeout(timeout_minutes)  # a new group does not take over that of all
    groups = [
        dist.new_group(list(range(first, first + size)), timeout=timeout) for first in range(0, ranks.world_size, size)
    ]
    return groups[ranks.rank // size]


def make_batch_norm_group(config: Config, ranks: Ranks, device: torch.device) -> str | None:
    """Return the name of a group of all ranks for BatchNorm's statistics; None if they are each rank's own. Every rank calls
    this.

    NCCL runs the collectives of one group one after the other. In DDP's group a layer's few numbers would wait for the 25 MB of
    gradients sent before them, and backward with them."""
    if ranks.world_size == 1 or config.model.batch_norm_ranks == "local":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if device.type == "cuda" else None
    group: Any = dist.new_group(timeout=_collective_timeout(config.timeout_minutes), pg_options=options)
    return str(group.group_name)


def _collective_timeout(timeout_minutes: float) -> timedelta:
    """Shorter than the watchdog's, so that a rank that waits for another says so before it is ended."""
    return timedelta(minutes=0.8 * timeout_minutes)


def wrap_model(
    model: nn.Module, ranks: Ranks, device: torch.device, *, compression: str = "none", accumulates: bool = False
) -> nn.Module:
    """DDP: gradients are averaged over ranks. BatchNorm's buffers are not broadcast: checkpoints hold the first rank's.

    compression: bf16 or fp16, the type in which gradients are sent and summed; none: as they are.
    accumulates: whether some backwards keep their gradients to themselves, which DDP's static graph does not bear (torch 2.14
    fails an assertion of its own).
    """
    if ranks.world_size == 1:
        return model
    names = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    # torch 2.14 renamed this parameter
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    leave_buffers: dict[str, Any] = {sync_buffers: False}
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        **leave_buffers,
        gradient_as_bucket_view=True,
        static_graph=not accumulates,
    )
    if compression != "none":
        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        wrapped.register_comm_hook(None, hooks[compression])
    return wrapped


def one_rank_a_node_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do `work()` on every rank, on one of each node before the others: it may write a file that the others then read."""
    done = work() if ranks.local_rank == 0 else None
    if ranks.world_size > 1:
        dist.barrier()
    return work() if done is None else done


def open_on_all_ranks(data: DataConfig, split: str, ranks: Ranks) -> Index:
    """Open a split on every rank, first on one of each node, which indexes it if necessary. Every rank calls this.

    Raises InputError as `open_images` does."""
    return one_rank_a_node_first(ranks, lambda: open_images(data, split, progress=ranks.is_first))


def require_same(ranks: Ranks, name: str, value: str) -> None:
    """Raise InputError on every rank, naming those that differ from rank 0, unless `value` is the same on all ranks."""
    if ranks.world_size == 1:
        return
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, (value, socket.gethostname()))
    different = [
        f"  - rank {rank} on {host} has {own}, rank 0 on {values[0][1]} has {values[0][0]}"
        for rank, (own, host) in enumerate(values)
        if own != values[0][0]
    ]
    if different:
        listed = "\n".join(different[:8])
        raise InputError(f"{name} are not the same on all ranks:\n{listed}\nGive every node the same copy of the set")


def agree(values: Tensor, ranks: Ranks) -> Tensor:
    """Return the largest of each value over all ranks, on the device: the one small all-reduce of a step."""
    if ranks.world_size > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values
