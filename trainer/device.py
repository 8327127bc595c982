"""Which device a rank takes, and in which precision it multiplies there."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch

from trainer.cluster.ranks import Ranks
from trainer.config import Config
from trainer.errors import InputError


def choose_device(config: Config, ranks: Ranks) -> torch.device:
    """The rank's device. Raises InputError where a GPU is asked for and there is none."""
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


PRECISION_NAMES = {None: "float32", torch.bfloat16: "bf16 autocast", torch.float16: "fp16 autocast"}
"""The result of `autocast_dtype` in words."""


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """bf16, fp16 or None (float32): what config.precision means on this device."""
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
    """Memory in use, and how much there is, GiB. On a GPU all that is in use, whoever uses it; on a CPU this process's, and the
    limit of its control group or the memory of the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30, total / 2**30
    page = os.sysconf("SC_PAGE_SIZE")
    used = int(Path("/proc/self/statm").read_text().split()[1]) * page
    return used / 2**30, min(os.sysconf("SC_PHYS_PAGES") * page, *_group_limits(), sys.maxsize) / 2**30


@functools.cache
def _group_limits() -> tuple[int, ...]:
    """The memory limits of this process's control groups and those above them, bytes, in version 1 or 2 of such groups."""
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
