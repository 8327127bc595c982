"""Collective work of the ranks: process group, DDP, slice groups, opening a split together."""

from __future__ import annotations

import atexit
import inspect
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from trainer.config.schema import Config, DataConfig
from trainer.data.index import Index, open_images
from trainer.distributed.device import compiles
from trainer.distributed.peers import Failure, Peers
from trainer.distributed.ranks import Ranks
from trainer.distributed.rendezvous import compare_ranks, meet
from trainer.errors import InputError, exit_code_of

T = TypeVar("T")
# shares of timeout_minutes, after which a rank that waits for files is ended: so it is this rank that the others hear of
_WAIT_SHARE = 0.8  # for another rank at the start, and in gloo's collectives
_STEP_SHARE = 1.1  # a step over NCCL
_NCCL_SHARE = 1.5
# autotuning a ResNet-50 takes up to 10; another rank may take longer, or find its kernels cached
_COMPILE_MINUTES = 30.0
_peers = Peers()  # of this process, as torch's own group is


def peers() -> Peers:
    """Return the other ranks of the job, while `process_group` is open."""
    return _peers


@contextmanager
def process_group(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    *,
    facts: Mapping[str, Any] | None = None,
    first: Callable[[], None] = lambda: None,
    before_exit: Callable[[Failure], None] = lambda failure: None,
) -> Iterator[None]:
    """Open the group of all ranks while the block runs; there is none if this process is alone.

    facts: what must be the same on all ranks, by name.
    first: called on rank 0 when all ranks have joined, before any of them continues. If it raises InputError or
        TrainingFailedError, every rank raises it.
    before_exit: called before the process is ended because another rank has failed.
    """
    global _peers
    if ranks.world_size == 1:
        first()
        yield
        return
    on_gpu = device.type == "cuda"
    timeout = timedelta(minutes=_WAIT_SHARE * config.timeout_minutes)
    began = time.monotonic()
    store = meet(ranks, timeout)
    # the start as a whole waits no longer than the time-out
    left = max(timeout - timedelta(seconds=time.monotonic() - began), timedelta(seconds=1))
    own_gpu = {"gpu": str(torch.cuda.get_device_properties(device).uuid)} if on_gpu else {}
    compare_ranks(store, ranks, {**(facts or {}), "device": device.type, **own_gpu}, left, first)
    _peers = Peers(store, ranks)
    try:
        with _peers.watched(before_exit):
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=ranks.rank,
                world_size=ranks.world_size,
                timeout=collective_timeout(config, device),
                device_id=device if on_gpu else None,
            )
            yield
    except BaseException as error:
        _peers.tell(error)
        _peers.wait_until_heard()
        cause = _peers.cause_of(error)
        if on_gpu:
            # NCCL's clean-up, by destroy_process_group or at Python's end, waits for ranks that hang in a collective
            atexit.register(_exit_at_once, exit_code_of(cause))
        elif dist.is_initialized():
            dist.destroy_process_group()
        if cause is not error:
            raise cause from error
        raise
    finally:
        _peers = Peers()
    dist.destroy_process_group()


def _exit_at_once(code: int) -> None:
    """End the process at Python's exit, before NCCL's clean-up. Handlers registered earlier do not run, so output is flushed
    here."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def make_loss_group(size: int, config: Config, ranks: Ranks, device: torch.device) -> Any:
    """Return the process group of this rank's neighbours; None if it has none. Every rank calls this."""
    if size == 1:
        return None
    timeout = collective_timeout(config, device)  # a new group does not take over that of all
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
    group: Any = dist.new_group(timeout=collective_timeout(config, device), pg_options=options)
    return str(group.group_name)


def collective_timeout(config: Config, device: torch.device) -> timedelta:
    """Return the time after which a collective fails.

    gloo's is shorter than timeout_minutes where nothing compiles, so that a rank that waits for another says so before the
    watchdog ends it. NCCL ends the process without a word, so its time-out comes after the watchdog's (`step_seconds`)."""
    share = _NCCL_SHARE if device.type == "cuda" else _WAIT_SHARE
    return timedelta(minutes=share * config.timeout_minutes + (_COMPILE_MINUTES if compiles(config, device) else 0.0))


def step_seconds(config: Config, ranks: Ranks, device: torch.device, *, may_compile: bool) -> float | None:
    """Return how long a step may hang before the watchdog ends the process. None if this rank is alone, or over gloo, whose
    collectives fail by themselves."""
    if ranks.world_size == 1 or device.type != "cuda":
        return None
    extra = _COMPILE_MINUTES if may_compile and compiles(config, device) else 0.0
    return 60 * (_STEP_SHARE * config.timeout_minutes + extra)


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
    """Do `work()` on every rank, on one of each node before the others: it may write a file that the others then read.

    Raises InputError on every rank if the work of any rank raises InputError or OSError."""
    found: list[T] = []
    for is_turn in (ranks.local_rank == 0, ranks.local_rank > 0):
        problem = None
        try:
            found += [work()] if is_turn else []
        except (InputError, OSError) as error:
            problem = error
        _peers.check(problem)
    return found[0]


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
