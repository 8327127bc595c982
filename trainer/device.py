"""Which device a rank takes, and in which precision it multiplies there."""

from __future__ import annotations

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
    if ranks.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"rank {ranks.rank} is number {ranks.local_rank} on its node, which has {torch.cuda.device_count()} GPU(s): "
            "start one rank a GPU"
        )
    torch.cuda.set_device(ranks.local_rank)
    torch.backends.cudnn.benchmark = True  # shapes never change
    return torch.device("cuda", ranks.local_rank)


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
