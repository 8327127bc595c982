"""Cost of the W-MSE loss alone: the authors' loop against each backend of the whitening, in one run on one machine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trainer.bench.cost import MEANING, measure_cost
from trainer.bench.floor import Ceilings, floor, measure_ceilings
from trainer.bench.implementations import BASES, drop_refusing, loop_loss, runnable_backends
from trainer.bench.shapes import RECIPE_SHAPES, LossShape, not_measured, shape_of_config
from trainer.bench.timing import Window, spread, take_turns, timed, timed_after
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.losses.wmse import draw_permutations, wmse_loss
from trainer.run.machine import provenance

FLOAT64 = "torch_float64_factor"
MODES = ("forward", "backward", "forward_backward")

Forward = Callable[[], Tensor]  # -> loss


def bench_loss(shapes: Sequence[LossShape] | None, device: str, seconds: float) -> dict[str, Any]:
    """Measure every implementation at every shape (None: RECIPE_SHAPES) for about `seconds` in all.

    Returns plain numbers. For each shape and implementation: "figures", microseconds a call in each mode (median and
    quartiles of windows that take turns), ratios as time of loop or reference over time of this one; "costs", see
    "meaning", and times_floor, how many times the shape's "floor" (`trainer.bench.floor`) its forward and backward take.
    "not_run" says in words why an implementation is missing. Prints tables to stderr.
    """
    shapes, where = shapes or RECIPE_SHAPES, torch.device(device)
    backends, not_run = runnable_backends(where)
    ceilings = measure_ceilings(where, min(2.0, seconds / 10))
    results = [_bench_shape(shape, where, seconds / len(shapes), backends, ceilings) for shape in shapes]
    _print_tables(results, not_run)
    return {
        "bench": "loss",
        "device_type": where.type,
        **provenance(where),
        "unit": "microseconds a call",
        "meaning": MEANING,
        "ceilings": ceilings.as_json(),
        "not_run": not_run,
        "results": results,
    }


def bench_config(config: Config, num_ranks: int, seconds: float) -> dict[str, Any]:
    """`bench_loss` at the shape of one of `num_ranks` ranks of an experiment, on its device."""
    set_aside = not_measured(config)
    for each in set_aside:
        print(f"note: {each}", file=sys.stderr)
    shapes, device = [shape_of_config(config, num_ranks)], choose_device(config, Ranks())
    return {**bench_loss(shapes, str(device), seconds), "ranks": num_ranks, "not_measured": set_aside}


def _bench_shape(
    shape: LossShape, device: torch.device, seconds: float, backends: Sequence[str], ceilings: Ceilings
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    rows = shape.num_views * shape.num_images
    v = torch.randn(rows, shape.embedding_size, device=device, generator=generator).requires_grad_()
    permutations = draw_permutations(shape.iterations, shape.num_images, device, generator)
    forwards = _implementations(shape, v, permutations, backends)
    refused = drop_refusing(forwards)
    windows = {(name, mode): _window(forward, mode, v) for mode in MODES for name, forward in forwards.items()}
    figures = _figures(take_turns(windows, seconds))
    best = floor(shape, ceilings)
    costs: dict[str, dict[str, float]] = {name: {**measure_cost(forward, v)} for name, forward in forwards.items()}
    for name, cost in costs.items():
        cost["times_floor"] = figures[name]["forward_backward"]["median"] / best["floor_us"]
    return {"shape": shape._asdict(), "floor": best, "figures": figures, "costs": costs, "not_run": refused}


def _implementations(shape: LossShape, v: Tensor, permutations: Tensor, backends: Sequence[str]) -> dict[str, Forward]:
    forwards: dict[str, Forward] = {
        "loop": functools.partial(loop_loss, v, permutations, num_views=shape.num_views, slice_size=shape.slice_size)
    }
    variants = [(name, name, False) for name in backends]
    if "torch" in backends:
        variants.append((FLOAT64, "torch", True))
    for name, backend, cholesky_float64 in variants:
        forwards[name] = functools.partial(
            wmse_loss,
            v,
            num_views=shape.num_views,
            slice_size=shape.slice_size,
            iterations=shape.iterations,
            permutations=permutations,
            backend=backend,
            cholesky_float64=cholesky_float64,
        )
    return forwards


def _window(forward: Forward, mode: str, v: Tensor) -> Window:
    if mode == "forward":
        return timed(forward, v.device)
    if mode == "backward":
        return timed_after(forward, lambda loss: torch.autograd.grad(loss, v), v.device)
    return timed(lambda: torch.autograd.grad(forward(), v), v.device)


def _figures(times: dict[tuple[str, str], list[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """-> implementation -> mode -> median, quartiles, windows, and how many times as fast as loop and reference."""
    spreads = {window: spread(samples) for window, samples in times.items()}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for (name, mode), figure in spreads.items():
        ratios = {f"speedup_over_{base}": spreads[base, mode]["median"] / figure["median"] for base in BASES}
        figures.setdefault(name, {})[mode] = {**figure, **ratios}
    return figures


def _print_tables(results: list[dict[str, Any]], not_run: dict[str, str]) -> None:
    times = Table("d, N, M, k, iterations", "implementation", *MODES, "x loop", "x reference")
    times.caption = "microseconds a call: median (quartiles); ratios of forward_backward"
    counts = [name for name in MEANING if name in results[0]["costs"]["loop"]]
    costs = Table("d, N, M, k, iterations", "implementation", *counts, "x floor", "floor")
    costs.caption = "forward and backward; floor: microseconds, and what sets it"
    for result in results:
        sizes = ", ".join(map(str, result["shape"].values()))
        for name, modes in result["figures"].items():
            cells = [f"{f['median']:,.0f} ({f['quartile_1']:,.0f}-{f['quartile_3']:,.0f})" for f in modes.values()]
            both, cost = modes["forward_backward"], result["costs"][name]
            ratios = [f"{both['speedup_over_loop']:.2f}", f"{both['speedup_over_reference']:.2f}"]
            times.add_row(sizes, name, *cells, *ratios)
            best = f"{result['floor']['floor_us']:,.1f} {result['floor']['bound']}"
            costs.add_row(sizes, name, *(f"{cost[n]:,}" for n in counts), f"{cost['times_floor']:.1f}", best)
        times.add_section()
        costs.add_section()
    console = Console(stderr=True, width=130)
    for table in (times, costs):
        console.print(table)
    for refused in (not_run, *(result["not_run"] for result in results)):
        for name, reason in refused.items():
            console.print(f"not run: {name}: {reason}")
