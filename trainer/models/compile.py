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
    """Compile `networks` in place, before DDP wraps them, so that the names of parameters stay plain.

    The compilation itself happens in the first step, and again at each size of the views, because shapes are fixed. A graph
    break is an error, because it would silently lose what compilation gains.
    """
    import torch._functorch.config
    import torch._inductor.config

    on_gpu = device.type == "cuda"
    mode = _INDUCTOR_MODES[config.autotune and on_gpu, config.cuda_graphs and on_gpu]
    # These settings are global to the process, because torch has no option for a single model.
    torch._functorch.config.activation_memory_budget = config.model.activation_memory_budget
    torch._inductor.config.compile_threads = own_cores()  # the default is up to 32 processes for each rank
    # Without timing, the same kernels are chosen in each process. Older versions of torch lack this option.
    if hasattr(torch._inductor.config, "deterministic"):
        torch._inductor.config.deterministic = config.deterministic
    options = {"mode": mode} if backend == "inductor" else {}
    networks.compile(fullgraph=True, dynamic=False, backend=backend, **options)
