"""Measure the W-MSE loss alone: each whitening backend against the authors' loop, in one run on one machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.bench.ceilings import Ceilings, loss_floor, measure_ceilings
from trainer.bench.implementations import BASES, drop_refusing, loop_loss, runnable_backends
from trainer.bench.shapes import RECIPE_SHAPES, LossShape, not_measured, shape_of_config
from trainer.bench.timing import Window, interleave, spread, timed, timed_after
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.losses.wmse import draw_permutations, wmse_loss
from trainer.run.machine import provenance
from trainer.tools.memory import saved_storages

FLOAT64 = "torch_float64_factor"
MODES = ("forward", "backward", "forward_backward")
MEANING = {
    "saved_bytes": "storages that autograd keeps from forward to backward, each counted once, with v if it is saved"
}

Forward = Callable[[], Tensor]  # returns the loss


def bench_loss(shapes: Sequence[LossShape] | None, device: str, seconds: float) -> dict[str, Any]:
    """Measure every implementation at every shape (None: RECIPE_SHAPES) in about `seconds`.

    For each shape and implementation the result has:
    figures: microseconds of a call in each mode (median and quartiles), and speedup_over_loop and _reference.
    costs: saved_bytes (see "meaning"), and times_floor, the time of forward and backward over the shape's "floor"
    (`ceilings.loss_floor`).
    "not_run" names the implementations that are missing, and the reasons.
    """
    shapes = shapes or RECIPE_SHAPES
    where = torch.device(device)
    backends, not_run = runnable_backends(where)
    # The best rates of the machine give the floor of each shape. The rest of the time goes to the shapes.
    ceilings = measure_ceilings(where, min(2.0, seconds / 10))
    share = seconds / len(shapes)
    return {
        "bench": "loss",
        "device_type": where.type,
        **provenance(where),
        "unit": "microseconds a call",
        "meaning": MEANING,
        "ceilings": ceilings.as_json(),
        "not_run": not_run,
        "results": [_bench_shape(shape, where, share, backends, ceilings) for shape in shapes],
    }


def bench_config(config: Config, num_ranks: int, seconds: float) -> dict[str, Any]:
    """Measure at the shape of one of `num_ranks` ranks of an experiment, on the device of the experiment."""
    # The authors' loop has fewer settings than the loss.
    ignored = not_measured(config)
    for each in ignored:
        print(f"note: {each}", file=sys.stderr)
    device = choose_device(config, Ranks())
    shape = shape_of_config(config, num_ranks)
    result = bench_loss([shape], str(device), seconds)
    return {**result, "ranks": num_ranks, "not_measured": ignored}


def _bench_shape(
    shape: LossShape, device: torch.device, seconds: float, backends: Sequence[str], ceilings: Ceilings
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    rows = shape.num_views * shape.num_images
    v = torch.randn(rows, shape.embedding_size, device=device, generator=generator).requires_grad_()
    permutations = draw_permutations(shape.iterations, shape.num_images, device, generator)
    forwards = _implementations(shape, v, permutations, backends)
    refused = drop_refusing(forwards)
    # All implementations and modes alternate.
    windows = {(name, mode): _window(forward, mode, v) for mode in MODES for name, forward in forwards.items()}
    figures = _figures(interleave(windows, seconds))
    # Memory is counted in one more forward, outside the measured windows.
    floor = loss_floor(shape, ceilings)
    costs = {}
    for name, forward in forwards.items():
        saved = saved_storages(forward).values()
        both = figures[name]["forward_backward"]
        costs[name] = {
            "saved_bytes": sum(storage.nbytes() for storage in saved),
            "times_floor": both["median"] / floor["floor_us"],
        }
    return {"shape": shape._asdict(), "floor": floor, "figures": figures, "costs": costs, "not_run": refused}


def _implementations(shape: LossShape, v: Tensor, permutations: Tensor, backends: Sequence[str]) -> dict[str, Forward]:
    """Return the forward of every implementation, by name: the loop, each backend, and the factor in float64."""
    sizes: Any = {"num_views": shape.num_views, "slice_size": shape.slice_size}
    batched = partial(wmse_loss, v, **sizes, iterations=shape.iterations, permutations=permutations)
    forwards: dict[str, Forward] = {"loop": partial(loop_loss, v, permutations, **sizes)}
    for name in backends:
        forwards[name] = partial(batched, backend=name)
    if "torch" in backends:
        forwards[FLOAT64] = partial(batched, backend="torch", cholesky_float64=True)
    return forwards


def _window(forward: Forward, mode: str, v: Tensor) -> Window:
    """Return the timer of a mode. Backward alone needs a new forward before each call, which is not timed."""
    if mode == "forward":
        return timed(forward, v.device)
    if mode == "backward":
        return timed_after(forward, lambda loss: torch.autograd.grad(loss, v), v.device)
    return timed(lambda: torch.autograd.grad(forward(), v), v.device)


def _figures(times: dict[tuple[str, str], list[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by implementation and mode, the microseconds and the speed as a multiple of loop and reference."""
    spreads = {window: spread(samples, 1e6) for window, samples in times.items()}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for (name, mode), figure in spreads.items():
        # The two bases are always measured, see `drop_refusing`.
        ratios = {}
        for base in BASES:
            base_time = spreads[base, mode]["median"]
            ratios[f"speedup_over_{base}"] = base_time / figure["median"]
        figures.setdefault(name, {})[mode] = {**figure, **ratios}
    return figures
