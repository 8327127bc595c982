"""Time of the W-MSE loss alone: a loop over slices, views and pairs, against each backend of the whitening, in one run."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kernels.whitening import BACKENDS
from trainer.losses.wmse import draw_permutations, wmse_loss
from trainer.machine import provenance

MODES = ("forward", "backward", "forward_backward")
CALLS_PER_WINDOW = 5

LossFunction = Callable[[Tensor, Tensor], Tensor]  # (v, permutations) -> loss


class LossShape(NamedTuple):
    """Sizes of one measurement: v is (num_views * num_images, embedding_size)."""

    num_views: int
    num_images: int
    slice_size: int
    embedding_size: int
    iterations: int


RECIPE_SHAPES = (  # REFERENCE section 2: CIFAR and STL-10, each with 2 and with 4 views
    LossShape(2, 512, 128, 64, 1),
    LossShape(4, 256, 128, 64, 1),
    LossShape(2, 512, 256, 128, 4),
    LossShape(4, 256, 256, 128, 1),
)


def bench_loss(shapes: Sequence[LossShape] | None, device: str, seconds: float) -> dict[str, Any]:
    """Measure every implementation at every shape (None: RECIPE_SHAPES) for about `seconds` a shape.

    The implementations take turns in windows of a few calls, so that a busy machine slows all of them alike; warm-up
    calls are left out and the device is synchronised around each window. Returns plain numbers, times in microseconds a
    call (median and quartiles of the windows), ratios as time of loop or reference over time of this implementation.
    Prints a table to stderr.
    """
    results = [_bench_shape(shape, torch.device(device), seconds) for shape in shapes or RECIPE_SHAPES]
    _print_table(results)
    return {
        "bench": "loss",
        **provenance(torch.device(device)),
        "unit": "microseconds a call",
        "results": results,
    }


def loop_loss(v: Tensor, permutations: Tensor, *, num_views: int, slice_size: int) -> Tensor:
    """W-MSE as it is usually written: slice by slice, view by view, W by an explicit inverse, a double loop over pairs.

    v: (num_views * N, k), permutations: (iterations, N) -> scalar; equals `wmse_loss` with normalize=True.
    """
    identity = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)
    total = v.new_zeros(())
    for permutation in permutations:
        views = [_whiten_view(view[permutation], slice_size, identity) for view in v.chunk(num_views)]
        units = [torch.nn.functional.normalize(view, dim=1) for view in views]
        for i in range(num_views):
            for j in range(i + 1, num_views):
                total = total + (2 - 2 * (units[i] * units[j]).sum(1)).mean()
    return total / (len(permutations) * num_views * (num_views - 1) / 2)


def _whiten_view(view: Tensor, slice_size: int, identity: Tensor) -> Tensor:
    whitened = []
    for rows in view.split(slice_size):
        centred = rows - rows.mean(0)
        lower = torch.linalg.cholesky(centred.T @ centred / (slice_size - 1))
        whitened.append(centred @ torch.linalg.solve_triangular(lower, identity, upper=False).T)
    return torch.cat(whitened)


def _bench_shape(shape: LossShape, device: torch.device, seconds: float) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    rows = shape.num_views * shape.num_images
    v = torch.randn(rows, shape.embedding_size, device=device, generator=generator).requires_grad_()
    permutations = draw_permutations(shape.iterations, shape.num_images, device, generator)
    functions = _implementations(shape)
    windows = [(name, mode) for name in functions for mode in MODES]
    times: dict[tuple[str, str], list[float]] = {window: [] for window in windows}
    for name, mode in windows:  # warm-up
        _time_window(functions[name], mode, v, permutations)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[windows[0]]) < 2:
        for name, mode in windows:
            times[name, mode].append(_time_window(functions[name], mode, v, permutations))
    return {"shape": shape._asdict(), "figures": _figures(times)}


def _implementations(shape: LossShape) -> dict[str, LossFunction]:
    functions: dict[str, LossFunction] = {
        "loop": functools.partial(loop_loss, num_views=shape.num_views, slice_size=shape.slice_size)
    }
    for backend in BACKENDS:
        functions[backend] = functools.partial(_batched_loss, shape=shape, backend=backend)
    return functions


def _batched_loss(v: Tensor, permutations: Tensor, shape: LossShape, backend: str) -> Tensor:
    return wmse_loss(
        v,
        num_views=shape.num_views,
        slice_size=shape.slice_size,
        iterations=shape.iterations,
        permutations=permutations,
        backend=backend,
    )


def _time_window(function: LossFunction, mode: str, v: Tensor, permutations: Tensor) -> float:
    """Microseconds a call. In mode "backward" each forward runs, and is waited for, outside the clock."""
    elapsed = 0.0
    _synchronize(v.device)
    if mode == "backward":
        for _ in range(CALLS_PER_WINDOW):
            loss = function(v, permutations)
            _synchronize(v.device)
            start = time.perf_counter()
            torch.autograd.grad(loss, v)
            _synchronize(v.device)
            elapsed += time.perf_counter() - start
    else:
        start = time.perf_counter()
        for _ in range(CALLS_PER_WINDOW):
            loss = function(v, permutations)
            if mode == "forward_backward":
                torch.autograd.grad(loss, v)
        _synchronize(v.device)
        elapsed = time.perf_counter() - start
    return elapsed / CALLS_PER_WINDOW * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _figures(times: dict[tuple[str, str], list[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """-> implementation -> mode -> median, quartiles, windows, and how many times as fast as loop and reference."""
    medians = {window: statistics.median(samples) for window, samples in times.items()}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for (name, mode), samples in times.items():
        lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
        figures.setdefault(name, {})[mode] = {
            "median": medians[name, mode],
            "quartile_1": lower,
            "quartile_3": upper,
            "windows": len(samples),
            "speedup_over_loop": medians["loop", mode] / medians[name, mode],
            "speedup_over_reference": medians["reference", mode] / medians[name, mode],
        }
    return figures


def _print_table(results: list[dict[str, Any]]) -> None:
    table = Table("d, N, M, k, iterations", "implementation", *MODES, "x loop", "x reference")
    for result in results:
        for name, modes in result["figures"].items():
            cells = [f"{f['median']:,.0f} ({f['quartile_1']:,.0f}-{f['quartile_3']:,.0f})" for f in modes.values()]
            both = modes["forward_backward"]
            ratios = [f"{both['speedup_over_loop']:.2f}", f"{both['speedup_over_reference']:.2f}"]
            table.add_row(", ".join(map(str, result["shape"].values())), name, *cells, *ratios)
        table.add_section()
    table.caption = "microseconds a call: median (quartiles); ratios of forward_backward"
    Console(stderr=True, width=130).print(table)
