"""Time an update of the recipe's ResNet-50: python -m tests.gpu.time_optimizers OUT.json [--tiny]

This times LARS by torch and by Triton, checks that the two agree, and times torch's Adam and SGD for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.gpu.part import Line, Task, main, without_waiting
from tests.gpu.time_step import RECIPE, TINY
from trainer.bench.timing import interleave, spread, timed
from trainer.config.schema import OptimizerConfig
from trainer.distributed.ranks import Ranks
from trainer.optimizer import build_optimizer, update

OPTIMIZERS = {
    "lars torch": OptimizerConfig(backend="torch"),
    "lars triton": OptimizerConfig(backend="triton"),
    "adam": OptimizerConfig(name="adam"),
}
TOLERANCE = 1e-4  # of an update's norm; another order of a sum of a million squares changes it by about 1e-6
LARS_TARGET_MS = 0.5


def model_of(task: Task) -> nn.Module:
    """Build the recipe's model with random gradients; weights and gradients are the same at each call."""
    config = TINY if task.tiny else RECIPE
    method = config.method_settings.build(config, Ranks(), task.device)
    model = method.networks
    # Draw on the CPU, so that every device gets the same gradients.
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        gradient = 1e-3 * torch.randn(p.shape, generator=generator)
        p.grad = torch.empty_like(p).copy_(gradient)
    return model


def updates(task: Task, config: OptimizerConfig) -> list[torch.Tensor]:
    """Return how far a few updates move each weight."""
    model = model_of(task)
    optimizer = build_optimizer(model, config, task.device)
    before = [p.detach().clone() for p in model.parameters()]
    sound = torch.zeros((), dtype=torch.bool, device=task.device)
    for _ in range(1 if task.tiny else 3):
        # Set the gradients before each update, because some optimizers change them.
        for p in model.parameters():
            p.grad = 1e-3 * p.detach().sign() + 1e-4
        update(optimizer, 1.0, sound)
    return [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]


def agreement(task: Task) -> Line:
    """Return the largest difference of a tensor's updates by torch and by Triton, relative to their norm."""
    by_torch = updates(task, OPTIMIZERS["lars torch"])
    by_triton = updates(task, OPTIMIZERS["lars triton"])
    differences = [(a - b).norm() / a.norm() for a, b in zip(by_torch, by_triton, strict=True)]
    # The maximum is NaN if any difference is.
    worst = torch.stack(differences).max().item()
    line: Line = {"name": "lars agreement", "said": f"{worst:.1e}", "difference": worst}
    if not worst <= TOLERANCE:
        line["problem"] = f"triton's updates differ from torch's by more than {TOLERANCE:.0e}"
    return line


def time_optimizers(task: Task) -> Iterator[Line]:
    """Yield the line of the agreement, then one for each optimizer."""
    yield agreement(task)
    sound = torch.zeros((), dtype=torch.bool, device=task.device)
    steps: dict[str, Callable[[], Any]] = {}
    for name, config in OPTIMIZERS.items():
        if task.tiny and config.backend == "triton":  # an interpreted update takes seconds
            continue
        optimizer = build_optimizer(model_of(task), config, task.device)
        steps[name] = lambda optimizer=optimizer: update(optimizer, 1e-9, sound)
        steps[name]()  # compiles the kernels
        without_waiting(steps[name], task.device)
    for kind in ("foreach", "fused"):
        sgd = torch.optim.SGD(model_of(task).parameters(), 1e-9, momentum=0.9, **{kind: True})
        steps[f"sgd {kind}"] = sgd.step
    windows = {name: timed(step, task.device) for name, step in steps.items()}
    for name, seconds in interleave(windows, 0.1 if task.tiny else 5.0).items():
        figure = spread(seconds, 1e3)
        line: Line = {"name": name, "said": f"{figure['median']:.3f} ms", "milliseconds": figure}
        if name == "lars triton" and figure["median"] > LARS_TARGET_MS:
            line["problem"] = f"the target is {LARS_TARGET_MS} ms"
        yield line


if __name__ == "__main__":
    main(time_optimizers, __doc__)
