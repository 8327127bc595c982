"""Measure the whitening alone, forward and backward, with every backend that runs on the device: `wmse bench loss --sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernels.whitening import whiten
from trainer.bench.implementations import drop_refusing, runnable_backends
from trainer.bench.timing import interleave, spread, timed
from trainer.run.machine import provenance


class WhiteningSize(NamedTuple):
    """Sizes of the whitening's input x (slices, rows, size)."""

    slices: int
    rows: int
    size: int


Figures = dict[str, dict[str, float]]  # backend -> microseconds of forward and backward

LINES: Mapping[str, Sequence[WhiteningSize]] = {  # name of the size that grows -> points of the line
    "slices": tuple(WhiteningSize(slices, 128, 64) for slices in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    "size": tuple(WhiteningSize(8, 2 * size, size) for size in (8, 16, 32, 64, 128, 256)),
    "rows": tuple(WhiteningSize(8, rows, 64) for rows in (72, 96, 128, 192, 256, 512, 1024)),
}


def bench_sweep(device: str, seconds: float, lines: Mapping[str, Sequence[WhiteningSize]] = LINES) -> dict[str, Any]:
    """Measure every backend at every point of the lines in about `seconds`."""
    where = torch.device(device)
    backends, not_run = runnable_backends(where)
    # Every point takes the same share of the time.
    num_points = sum(len(points) for points in lines.values())
    share = seconds / num_points
    results = []
    for line, sizes in lines.items():
        points = []
        for size in sizes:
            figures, refused = measure_size(size, where, share, backends)
            points.append({**size._asdict(), "figures": figures, "not_run": refused})
        results.append({"line": line, "points": points})
    return {
        "bench": "whitening_sweep",
        "device_type": where.type,
        **provenance(where),
        "unit": "microseconds of one forward and backward",
        "not_run": not_run,
        "lines": results,
    }


def measure_size(
    size: WhiteningSize, device: torch.device, seconds: float, backends: Iterable[str]
) -> tuple[Figures, dict[str, str]]:
    """Return the microseconds of each backend, and {name: reason} of the backends that refuse this size."""
    steps = whitening_steps(size, device, backends)
    refused = drop_refusing(steps)
    windows = {name: timed(step, device) for name, step in steps.items()}
    samples = interleave(windows, seconds)
    return {name: spread(values, 1e6) for name, values in samples.items()}, refused


def whitening_steps(size: WhiteningSize, device: torch.device, backends: Iterable[str]) -> dict[str, Callable[[], Any]]:
    """Return a function for each backend that makes forward and backward of `whiten`, on the same x and gradient."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(size, device=device, generator=generator).requires_grad_()
    gradient = torch.randn(size, device=device, generator=generator)

    def step_of(backend: str) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(whiten(x, backend=backend), x, gradient)

    return {backend: step_of(backend) for backend in backends}
