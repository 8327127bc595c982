"""Time of the whitening alone, forward and backward, as the number, the size and the rows of slices grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from kernels.whitening import whiten
from trainer.bench.implementations import drop_refusing, runnable_backends
from trainer.bench.timing import spread, take_turns, timed
from trainer.run.machine import provenance


class WhiteningSize(NamedTuple):
    """Sizes of the whitening's input x (slices, rows, size)."""

    slices: int
    rows: int
    size: int


LINES: Mapping[str, Sequence[WhiteningSize]] = {  # what grows along the line -> its points
    "slices": tuple(WhiteningSize(slices, 128, 64) for slices in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    "size": tuple(WhiteningSize(8, 2 * size, size) for size in (8, 16, 32, 64, 128, 256)),
    "rows": tuple(WhiteningSize(8, rows, 64) for rows in (72, 96, 128, 192, 256, 512, 1024)),
}


def bench_sweep(device: str, seconds: float, lines: Mapping[str, Sequence[WhiteningSize]] = LINES) -> dict[str, Any]:
    """Measure every backend at every point of the lines for about `seconds` in all.

    Returns plain numbers: for each line its points, with microseconds of one forward and backward of `whiten` from a given
    gradient (median and quartiles of windows that take turns). Prints a table to stderr.
    """
    where = torch.device(device)
    backends, not_run = runnable_backends(where)
    share = seconds / sum(len(points) for points in lines.values())
    results = [
        {"line": line, "points": [_bench_point(point, where, share, backends) for point in points]}
        for line, points in lines.items()
    ]
    _print_table(results, backends, not_run.items())
    return {
        "bench": "whitening_sweep",
        "device_type": where.type,
        **provenance(where),
        "unit": "microseconds of one forward and backward",
        "not_run": not_run,
        "lines": results,
    }


def whitening_steps(size: WhiteningSize, device: torch.device, backends: Iterable[str]) -> dict[str, Callable[[], Any]]:
    """-> {backend: one forward and backward of `whiten` on the same random x with the same gradient}."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(size, device=device, generator=generator).requires_grad_()
    gradient = torch.randn(size, device=device, generator=generator)

    def step_of(backend: str) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(whiten(x, backend=backend), x, gradient)

    return {backend: step_of(backend) for backend in backends}


def _bench_point(point: WhiteningSize, device: torch.device, seconds: float, backends: Sequence[str]) -> dict[str, Any]:
    steps = whitening_steps(point, device, backends)
    refused = drop_refusing(steps)
    samples = take_turns({name: timed(step, device) for name, step in steps.items()}, seconds)
    figures = {name: spread(values) for name, values in samples.items()}
    return {**point._asdict(), "figures": figures, "not_run": refused}


def _print_table(results: list[dict[str, Any]], backends: Sequence[str], not_run: Iterable[tuple[str, str]]) -> None:
    table = Table("line", "slices", "rows", "size", *backends)
    table.caption = "whitening alone, microseconds of one forward and backward: median (quartiles)"
    for result in results:
        for point in result["points"]:
            cells = [_cell(point["figures"].get(name)) for name in backends]
            table.add_row(result["line"], *(str(point[name]) for name in WhiteningSize._fields), *cells)
        table.add_section()
    console = Console(stderr=True, width=130)
    console.print(table)
    for name, reason in not_run:
        console.print(f"not run: {name}: {reason}")


def _cell(figure: dict[str, float] | None) -> str:
    if figure is None:
        return "refused"
    return f"{figure['median']:,.0f} ({figure['quartile_1']:,.0f}-{figure['quartile_3']:,.0f})"
