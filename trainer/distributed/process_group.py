"""Process groups: the group of all ranks, loss groups, DDP, and work that all ranks do together."""

from __future__ import annotations

import atexit
import inspect
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from trainer.distributed.geometry import batch_norm_group_size
from trainer.distributed.peers import Failure, Peers
from trainer.distributed.ranks import Ranks
from trainer.distributed.rendezvous import compare_ranks, meet
from trainer.errors import InputError, exit_code_of

T = TypeVar("T")
# Time limits as shares of timeout_minutes, the limit of a rank that waits for files.
_WAIT_SHARE = 0.8  # wait for another rank at the start, and in gloo's collectives
_STEP_SHARE = 1.1  # a step over NCCL
_NCCL_SHARE = 1.5  # NCCL's collectives
# Autotuning a ResNet-50 takes up to 10 minutes. Another rank may take longer, or find its kernels in the cache.
_COMPILE_MINUTES = 30.0
_peers = Peers()  # one for each process, like torch's default group


def peers() -> Peers:
    """Return the connection to the other ranks, while `process_group` is open."""
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
    """Open the group of all ranks while the block runs. A single rank needs no group and only calls `first`.

    facts: values by name that must be the same on all ranks.
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

    # Meet the other ranks and compare facts with them. Both together wait no longer than the time-out.
    began = time.monotonic()
    store = meet(ranks, timeout)
    waited = timedelta(seconds=time.monotonic() - began)
    left = max(timeout - waited, timedelta(seconds=1))
    all_facts = {**(facts or {}), "device": device.type}
    if on_gpu:
        # The comparison finds two ranks on one GPU, which NCCL does not support.
        properties = torch.cuda.get_device_properties(device)
        all_facts["gpu"] = str(properties.uuid)
    compare_ranks(store, ranks, all_facts, left, first)

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
        # Tell the other ranks first, because the clean-up may block.
        _peers.tell(error)
        _peers.wait_until_heard()
        cause = _peers.cause_of(error)
        if on_gpu:
            # NCCL's clean-up, in destroy_process_group or at Python's exit, waits for ranks that hang in a collective.
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
    """End the process at Python's exit, before NCCL's clean-up.

    Exit handlers that were registered earlier do not run, so this flushes the output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def make_loss_group(size: int, config: Config, ranks: Ranks, device: torch.device) -> Any:
    """Return the process group of this rank's loss group of `size` ranks; None for size 1. Every rank must call this."""
    return _make_group(size, config, ranks, device) if size > 1 else None


def make_batch_norm_group(config: Config, ranks: Ranks, device: torch.device) -> str | None:
    """Return the name of this rank's group for BatchNorm's statistics; None if each rank uses local statistics.

    Every rank must call this. NCCL runs the collectives of one group one after the other: in DDP's group, the few
    numbers of a layer would wait for the 25 MB of gradients sent before them, and the backward would wait as well."""
    size = batch_norm_group_size(config, ranks.world_size)
    if size == 1:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if device.type == "cuda" else None
    return str(_make_group(size, config, ranks, device, options).group_name)


def _make_group(size: int, config: Config, ranks: Ranks, device: torch.device, options: Any = None) -> Any:
    """Divide all ranks into groups of `size` neighbours; return this rank's group."""
    timeout = collective_timeout(config, device)  # a new group does not inherit the time-out of the default group
    # torch requires every rank to create every group, in the same order.
    groups = []
    for first in range(0, ranks.world_size, size):
        members = list(range(first, first + size))
        groups.append(dist.new_group(members, timeout=timeout, pg_options=options))
    return groups[ranks.rank // size]


def collective_timeout(config: Config, device: torch.device) -> timedelta:
    """Return the time after which a collective fails.

    Over gloo, without compilation, it is shorter than timeout_minutes: a rank that waits for another rank raises an
    error before its watchdog ends it. NCCL ends the process without a message, so its time-out is longer than the
    watchdog's limit (`step_seconds`)."""
    share = _NCCL_SHARE if device.type == "cuda" else _WAIT_SHARE
    extra = _COMPILE_MINUTES if compiles(config, device) else 0.0
    return timedelta(minutes=share * config.timeout_minutes + extra)


def step_seconds(config: Config, ranks: Ranks, device: torch.device, *, may_compile: bool) -> float | None:
    """Return the time after which the watchdog ends a process whose step hangs.

    None without a limit: for a single rank, and over gloo, whose collectives fail by themselves."""
    if ranks.world_size == 1 or device.type != "cuda":
        return None
    extra = _COMPILE_MINUTES if may_compile and compiles(config, device) else 0.0
    return 60 * (_STEP_SHARE * config.timeout_minutes + extra)


def wrap_model(
    model: nn.Module,
    ranks: Ranks,
    device: torch.device,
    *,
    compression: str = "none",
    accumulates: bool = False,
    fixed_buckets: bool = False,
) -> nn.Module:
    """Wrap the model in DDP, which averages gradients over ranks. A single rank gets the model itself.

    BatchNorm's buffers are not broadcast; checkpoints hold those of rank 0.

    compression: bf16 or fp16, the dtype in which gradients are sent and summed; none: their own dtype.
    accumulates: whether some backwards do not communicate their gradients (gradient accumulation). DDP's static graph
    does not support this: torch 2.14 fails an internal assertion.
    fixed_buckets: divide the gradients into the same buckets in every step. Otherwise the first step after each start has other
    buckets, and so other roundings on three or more ranks, because a bucket's place decides in which order ranks are summed.
    """
    if ranks.world_size == 1:
        return model
    # torch 2.14 renamed broadcast_buffers.
    names = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    buffer_option: dict[str, Any] = {sync_buffers: False}
    # Gradients are views of DDP's buckets, which saves a copy of all gradients.
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        **buffer_option,
        gradient_as_bucket_view=True,
        static_graph=not accumulates and not fixed_buckets,
        # DDP only rebuilds its buckets after the first step if it does not look for unused parameters.
        find_unused_parameters=fixed_buckets,
    )
    if compression != "none":
        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        wrapped.register_comm_hook(None, hooks[compression])
    return wrapped


def one_rank_a_node_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Call `work()` on every rank, first on local rank 0 of each node: it may write a file that the other ranks then read.

    Raises InputError on every rank if the work of any rank raises InputError or OSError."""
    results: list[T] = []
    # Two rounds: local rank 0 works in the first one, the other ranks of the node in the second one.
    for is_turn in (ranks.local_rank == 0, ranks.local_rank > 0):
        problem = None
        try:
            if is_turn:
                results.append(work())
        except (InputError, OSError) as error:
            problem = error
        _peers.check(problem)
    return results[0]


def open_on_all_ranks(data: DataConfig, split: str, ranks: Ranks) -> Index:
    """Open a split on every rank, first on one rank of each node, which builds the index if necessary.

    Every rank must call this. Raises InputError as `open_images` does."""
    return one_rank_a_node_first(ranks, lambda: open_images(data, split, progress=ranks.is_first))


def require_same(ranks: Ranks, name: str, value: str) -> None:
    """Raise InputError on every rank, naming the ranks that differ from rank 0, unless `value` is the same on all ranks."""
    if ranks.world_size == 1:
        return
    # Every rank gets the values of all ranks, so all of them come to the same verdict.
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, (value, socket.gethostname()))
    first_value, first_host = values[0]
    different = [
        f"  - rank {rank} on {host} has {other_value}, rank 0 on {first_host} has {first_value}"
        for rank, (other_value, host) in enumerate(values)
        if other_value != first_value
    ]
    if different:
        listed = "\n".join(different[:8])
        raise InputError(
            f"{name} are not the same on all ranks:\n{listed}\nGive every node the same copy of the data set"
        )


def sum_over_ranks(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Replace tensors of one data type by their sums over all ranks, in one collective. Every rank calls this."""
    if ranks.world_size == 1 or not tensors:
        return
    # Many small collectives would cost more than the copies.
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


def agree(values: Tensor, ranks: Ranks) -> Tensor:
    """Return the maximum of each value over all ranks, on the device. This is the one small all-reduce of a step."""
    if ranks.world_size > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values
