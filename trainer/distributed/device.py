"""Device and precision of a rank, and the memory in use."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError

_NONDETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")


def choose_device(config: Config, ranks: Ranks) -> torch.device:
    """Return the device of this rank.

    Sets whether torch only uses deterministic algorithms. Raises InputError if the config demands a GPU and torch finds none,
    or if the node has fewer GPUs than ranks."""
    _set_deterministic(config.deterministic)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but torch sees no GPU here: set device to cpu or auto")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible > 1 and ranks.local_rank >= visible:
        raise InputError(
            f"rank {ranks.rank} has local rank {ranks.local_rank} on its node, but sees only {visible} GPU(s): start one rank "
            "per GPU"
        )
    # With srun --gpus-per-task=1 each rank sees one GPU. `compare_ranks` makes sure that no two ranks have the same one.
    index = 0 if visible == 1 else ranks.local_rank
    torch.cuda.set_device(index)
    # Timing several algorithms pays off because shapes never change, but the fastest one may differ from start to start.
    torch.backends.cudnn.benchmark = not config.deterministic
    return torch.device("cuda", index)


def _set_deterministic(on: bool) -> None:
    """Let torch, cuBLAS and cuDNN only use algorithms that give the same bits each time, or any algorithm."""
    if on:
        # cuBLAS reads this when its first handle is made, which is after this point of a process.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    # Filling new tensors with NaN would only find programs that read memory before they write it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def names_nondeterministic() -> Iterator[None]:
    """Turn torch's error about an operation without a deterministic algorithm into an InputError that names it."""
    try:
        yield
    except RuntimeError as error:
        found = _NONDETERMINISTIC.search(str(error))
        if found is None:
            raise
        raise InputError(
            f"deterministic is true, but the operation {found[1]} has no deterministic algorithm on this device: set "
            "deterministic to false, or avoid the operation by other settings"
        ) from error


def compiles(config: Config, device: torch.device) -> bool:
    """Return whether torch.compile compiles the model on this device."""
    return config.compile == "true" or (config.compile == "auto" and device.type == "cuda")


PRECISION_NAMES = {None: "float32", torch.bfloat16: "bf16 autocast", torch.float16: "fp16 autocast"}
"""Names for the results of `autocast_dtype`."""


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast for config.precision on this device: bf16, fp16 or None (float32)."""
    # "auto" never chooses fp16, which needs a scaled loss.
    if config.precision == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_has_bf16()
        return torch.bfloat16 if fast else None
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
    return dtypes[config.precision]


def views_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """Return the data type of the views that `kernels.augment_triton` makes; None: DALI makes uint8 views.

    Raises InputError if the kernels cannot run on this device."""
    # Not at the top of the file, because the evaluator imports this module and needs no kernels.
    from kernels.backends import why_no_kernels

    if config.data.augment_backend == "dali":
        return None
    reason = why_no_kernels(device.type)
    if reason:
        raise InputError(f"data.augment_backend triton {reason}: set data.augment_backend to dali")
    return autocast_dtype(config, device) or torch.float32


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute convolutions in full float32 while the block runs.

    On a GPU, torch's default for them is TF32, which keeps 10 of the 23 bits."""
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def _cpu_has_bf16() -> bool:
    """Return whether the processor has bf16 dot products. Emulated ones are slower than float32."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set()
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16"})


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Return (memory in use, its limit) in GiB.

    On a GPU: the use of all processes, and the whole memory. On a CPU: the use of this process, and the limit of its
    control group or the machine's memory."""
    if device.type == "cuda":
        free, limit = torch.cuda.mem_get_info(device)
        used = limit - free
    else:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        # The second number of statm is the number of resident pages.
        statm = Path("/proc/self/statm").read_text()
        used = int(statm.split()[1]) * page_bytes
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * page_bytes
        limit = min([machine_bytes, *_group_limits()])
    return used / 2**30, limit / 2**30


@functools.cache
def _group_limits() -> tuple[int, ...]:
    """Return the memory limits of this process's control groups (version 1 or 2) and their parents, in bytes."""
    limits = []
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.exists() else []
    for line in lines:
        # A line is NUMBER:CONTROLLERS:PATH. In version 2 the controllers are empty.
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup", controllers)
        group = root / path.lstrip("/")
        # The group and its parents up to the root: the limit of each applies.
        levels = [level for level in (group, *group.parents) if level.is_relative_to(root)]
        for level in levels:
            for name in ("memory.max", "memory.limit_in_bytes"):
                file = level / name
                text = file.read_text().strip() if file.is_file() else ""
                if text.isdecimal():  # "max" means no limit
                    limits.append(int(text))
    return tuple(limits)
