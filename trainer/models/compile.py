"""Compile the networks with torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.config.schema import Config
from trainer.distributed.cores import own_cores

_INDUCTOR_MODES = {  # (autotune, cuda_graphs)
    (False, False): None,
    (False, True): "reduce-overhead",
    (True, False): "max-autotune-no-cudagraphs",
    (True, True): "max-autotune",
}


def compile_networks(
    networks: nn.Module, config: Config, device: torch.device, *, backend: str | Callable[..., Any] = "inductor"
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
    networks.compile(fullgraph=True, dynamic=False, backend=backend, mode=mode if backend == "inductor" else None)
