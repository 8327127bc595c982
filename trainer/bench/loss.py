"""Measure the W-MSE loss alone: the authors' loop against each backend of the whitening, in one run on one machine."""

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
MEANING = {"saved_bytes": "storages that autograd holds from forward to backward, each once, v included if it is saved"}

Forward = Callable[[], Tensor]  # returns the loss


def bench_loss(shapes: Sequence[LossShape] | None, device: str, seconds: float) -> dict[str, Any]:
    """Measure every implementation at every shape (None: RECIPE_SHAPES) in about `seconds`.

    For each shape and implementation the result has "figures": microseconds of a call in each mode (median and quartiles) and
    ratios, the time of loop or reference over that of this one; and "costs": saved_bytes, see "meaning", and times_floor, the
    time of forward and backward over the shape's "floor" (`ceilings.loss_floor`). "not_run" says what is missing, and why.
    """
    shapes = shapes or RECIPE_SHAPES
    where = torch.device(device)
    backends, not_run = runnable_backends(where)
    ceilings = measure_ceilings(where, min(2.0, seconds / 10))
    return {
        "bench": "loss",
        "device_type": where.type,
        **provenance(where),
        "unit": "microseconds a call",
        "meaning": MEANING,
        "ceilings": ceilings.as_json(),
        "not_run": not_run,
        "results": [_bench_shape(shape, where, seconds / len(shapes), backends, ceilings) for shape in shapes],
    }


def bench_config(config: Config, num_ranks: int, seconds: float) -> dict[str, Any]:
    """Measure at the shape of one of `num_ranks` ranks of an experiment, on its device."""
    set_aside = not_measured(config)
    for each in set_aside:
        print(f"note: {each}", file=sys.stderr)
    device = choose_device(config, Ranks())
    result = bench_loss([shape_of_config(config, num_ranks)], str(device), seconds)
    return {**result, "ranks": num_ranks, "not_measured": set_aside}


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
    figures = _figures(interleave(windows, seconds))
    floor = loss_floor(shape, ceilings)
    costs = {
        name: {
            "saved_bytes": sum(storage.nbytes() for storage in saved_storages(forward).values()),
            "times_floor": figures[name]["forward_backward"]["median"] / floor["floor_us"],
        }
        for name, forward in forwards.items()
    }
    return {"shape": shape._asdict(), "floor": floor, "figures": figures, "costs": costs, "not_run": refused}


def _implementations(shape: LossShape, v: Tensor, permutations: Tensor, backends: Sequence[str]) -> dict[str, Forward]:
    sizes = {"num_views": shape.num_views, "slice_size": shape.slice_size}
    batched = partial(wmse_loss, v, **sizes, iterations=shape.iterations, permutations=permutations)  # type: ignore[arg-type]
    forwards: dict[str, Forward] = {"loop": partial(loop_loss, v, permutations, **sizes)}
    for name in backends:
        forwards[name] = partial(batched, backend=name)
    if "torch" in backends:
        forwards[FLOAT64] = partial(batched, backend="torch", cholesky_float64=True)
    return forwards


def _window(forward: Forward, mode: str, v: Tensor) -> Window:
    if mode == "forward":
        return timed(forward, v.device)
    if mode == "backward":
        return timed_after(forward, lambda loss: torch.autograd.grad(loss, v), v.device)
    return timed(lambda: torch.autograd.grad(forward(), v), v.device)


def _figures(times: dict[tuple[str, str], list[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by implementation and mode, the microseconds and how many times as fast as loop and reference they are."""
    spreads = {window: spread(samples, 1e6) for window, samples in times.items()}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for (name, mode), figure in spreads.items():
        ratios = {f"speedup_over_{base}": spreads[base, mode]["median"] / figure["median"] for base in BASES}
        figures.setdefault(name, {})[mode] = {**figure, **ratios}
    return figures
