"""Choose a rank's device and precision, and measure its memory."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch

from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError


def choose_device(config: Config, ranks: Ranks) -> torch.device:
    """Return the rank's device. Raises InputError if a GPU is asked for and there is none, or fewer than ranks on the node."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but torch sees no GPU here: set device to cpu or auto")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible > 1 and ranks.local_rank >= visible:
        raise InputError(
            f"rank {ranks.rank} is number {ranks.local_rank} on its node, which shows it {visible} GPU(s): start one per GPU"
        )
    # one visible GPU is the rank's own (srun --gpus-per-task=1); that no two ranks have the same is checked when they meet
    index = 0 if visible == 1 else ranks.local_rank
    torch.cuda.set_device(index)
    torch.backends.cudnn.benchmark = True  # shapes never change
    return torch.device("cuda", index)


def compiles(config: Config, device: torch.device) -> bool:
    """Return whether torch.compile compiles the model on this device."""
    return config.compile == "true" or (config.compile == "auto" and device.type == "cuda")


PRECISION_NAMES = {None: "float32", torch.bfloat16: "bf16 autocast", torch.float16: "fp16 autocast"}
"""The result of `autocast_dtype` in words."""


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """Return the type of autocast for config.precision on this device: bf16, fp16 or None (float32)."""
    if config.precision == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_multiplies_bf16()
        return torch.bfloat16 if fast else None
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[config.precision]


def _cpu_multiplies_bf16() -> bool:
    """Whether the processor has bf16 dot products (emulated, they are slower than float32)."""
    flags = Path("/proc/cpuinfo")
    words = set(flags.read_text().split()) if flags.exists() else set()
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16"})


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Return (memory in use, its limit), GiB. On a GPU the use of all processes and the whole memory; on a CPU the use of this
    process and the limit of its control group or the machine's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30, total / 2**30
    page = os.sysconf("SC_PAGE_SIZE")
    used = int(Path("/proc/self/statm").read_text().split()[1]) * page
    return used / 2**30, min(os.sysconf("SC_PHYS_PAGES") * page, *_group_limits(), sys.maxsize) / 2**30


@functools.cache
def _group_limits() -> tuple[int, ...]:
    """Return the memory limits of this process's control groups (version 1 or 2) and their parents, bytes."""
    limits = []
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup", controllers)
        own = root / path.lstrip("/")
        above = [group for group in (own, *own.parents) if root in (group, *group.parents)]
        for file in [group / name for group in above for name in ("memory.max", "memory.limit_in_bytes")]:
            text = file.read_text().strip() if file.is_file() else ""
            limits += [int(text)] if text.isdecimal() else []  # "max": no limit
    return tuple(limits)
