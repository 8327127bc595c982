"""Measure the whitening alone, forward and backward, with every backend that runs on the device.

    python -m trainer.bench.whitening [--seconds S] [--device cpu|cuda] [--out FILE] [--slices B ...] [--sizes K ...]

The program finds the fastest backend in each cell of a grid of B slices with M = 2k rows of size k. It writes the table that
`backend="auto"` follows (kernels/backends_DEVICE_TYPE.json). The table lists the cells that are skipped
because they are too large for the memory or the time. `wmse bench loss --sweep` measures LINES.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the wmse command; must be set before torch is loaded

import torch

from kernels.whitening import whiten
from trainer.bench.implementations import drop_refusing, runnable_backends
from trainer.bench.timing import MIN_WINDOWS, interleave, spread, timed
from trainer.files import write_text
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
SLICES = (1, 4, 16, 64, 256)
SIZES = (8, 16, 32, 64, 128, 256, 512)
MAX_INPUT_BYTES = 128 * 2**20  # largest x of a cell; the reference backend needs about ten times as much memory
CALLS_AT_LEAST = MIN_WINDOWS + 3  # calls of each backend in a cell: three before its windows, and one in each window


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


def measure_grid(device: torch.device, seconds: float, slices: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the table that `backend="auto"` follows: the fastest backend in each cell of the grid.

    A cell is skipped if even CALLS_AT_LEAST calls are expected to take more than three times its share of `seconds`, judged by
    the same size with fewer slices."""
    backends, not_run = runnable_backends(device)
    share = seconds / (len(slices) * len(sizes))
    cells: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for size in sizes:
        # Seconds that one call of every backend takes for one slice; 0: not known yet.
        slice_seconds = 0.0
        for count in sorted(slices):
            at = WhiteningSize(count, 2 * size, size)
            reason = _too_large(at, slice_seconds * count, share)
            if reason:
                skipped.append({**at._asdict(), "reason": reason})
                continue
            figures, refused = measure_size(at, device, share, backends)
            microseconds = {name: round(figure["median"], 1) for name, figure in figures.items()}
            fastest = min(microseconds, key=microseconds.__getitem__)
            cell = {**at._asdict(), "microseconds": microseconds, "fastest": fastest}
            if refused:
                cell["refused"] = refused
            cells.append(cell)
            call_seconds = sum(microseconds.values()) / 1e6
            slice_seconds = call_seconds / count
    return {
        "device_type": device.type,
        **provenance(device),
        "unit": "microseconds of one forward and backward, median",
        "not_run": not_run,
        "cells": cells,
        "left_out": skipped,
    }


def _too_large(at: WhiteningSize, call_seconds: float, share: float) -> str | None:
    """Return why a cell is skipped, or None. call_seconds: expected time of one call of every backend."""
    num_bytes = at.slices * at.rows * at.size * 4
    if num_bytes > MAX_INPUT_BYTES:
        return f"x has {num_bytes >> 20} MiB, more than {MAX_INPUT_BYTES >> 20}"
    expected_seconds = CALLS_AT_LEAST * call_seconds
    if expected_seconds > 3 * share:
        return f"about {expected_seconds:.1f} s, with a share of {share:.1f} s a cell: give more --seconds"
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the grid, write the table and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the whole grid in seconds (default 60)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="file of the table (default kernels/backends_DEVICE_TYPE.json)")
    parser.add_argument("--slices", type=int, nargs="+", default=SLICES, metavar="B", help="numbers of slices")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="K", help="embedding sizes")
    own = parser.parse_args(argv)
    table = measure_grid(torch.device(own.device), own.seconds, own.slices, own.sizes)
    out = own.out or Path(__file__).parents[2] / "kernels" / f"backends_{own.device}.json"
    write_text(out, json.dumps(table, indent=1) + "\n")
    print(out)


if __name__ == "__main__":
    main()
