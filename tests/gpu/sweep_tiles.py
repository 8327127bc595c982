"""Which tiles of the Triton kernels are the fastest: python -m tests.gpu.sweep_tiles OUT.json [--tiny]

Changes what `kernels.whitening_triton._tiles` chooses: the tiles of the products with the factor's left as they are, the
factor's with those of the products, then the best of both together. Forward and backward as a CUDA graph, in windows
that take turns; a candidate counts only if it computes what the default computes. Kernels are compiled ahead by several
processes, which share Triton's cache on the disk.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor

from kernels import whitening_triton
from kernels.whitening import whiten
from tests.gpu.part import Part, begin, end, in_words, table, window_without_launches
from trainer.bench.timing import spread, take_turns

Size = tuple[int, int, int]  # slices, rows, embedding size
Tiles = dict[str, int]  # field of `_Tiles` -> its value; {}: as `_tiles` chooses
SECONDS = 3.0  # of measuring each size


class Grid(NamedTuple):
    """What is tried."""

    sizes: tuple[Size, ...]
    products: dict[str, tuple[int, ...]]
    factor: dict[str, tuple[int, ...]]


FULL = Grid(
    sizes=((4, 256, 128), (64, 256, 128), (8, 128, 64)),
    products={"tile": (16, 32, 64), "rows": (16, 32, 64), "depth": (16, 32)},
    factor={"panel": (16, 32), "factor_warps": (4, 8, 16)},
)
TINY = Grid(sizes=((1, 5, 2),), products={"rows": (16,)}, factor={"panel": (16,)})


def combinations(choices: dict[str, tuple[int, ...]]) -> list[Tiles]:
    """Every choice of each with every choice of the others."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


@contextmanager
def tiles_set_to(tiles: Tiles) -> Iterator[None]:
    """While the block runs, the Triton backend takes these tiles."""
    default = whitening_triton._tiles
    with mock.patch.object(whitening_triton, "_tiles", lambda size: default(size)._replace(**tiles)):
        yield


def both_passes(size: Size) -> tuple[Tensor, Tensor]:
    """z and the gradient of the same random rows, by the Triton backend."""
    x, gradient = _inputs(size)
    z = whiten(x, backend="triton")
    return z.detach(), torch.autograd.grad(z, x, gradient)[0]


def _inputs(size: Size) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(2, *size, generator=generator).to("cuda" if torch.cuda.is_available() else "cpu")
    return x.requires_grad_(), gradient


def refusal(tiles: Tiles, sizes: tuple[Size, ...]) -> str | None:
    """Why these tiles cannot be had at these sizes; None where they compute what the default tiles do."""
    for size in sizes:
        try:
            with tiles_set_to(tiles):
                results = both_passes(size)
        except triton.TritonError as error:  # too much shared memory, or the compiler's own
            return f"{size}: {in_words(error)}"
        for result, default in zip(results, both_passes(size), strict=True):
            error = ((result - default).norm() / default.norm()).item()
            if not error < 1e-4:
                return f"{size}: differs from the default tiles by {error:.1e}"
    return None


def microseconds(size: Size, candidates: list[Tiles], seconds: float) -> dict[int, dict[str, float]]:
    """Number of the candidate -> spread of one forward and backward."""
    x, gradient = _inputs(size)
    windows = {}
    for number, tiles in enumerate(candidates):

        def step(tiles: Tiles = tiles) -> Any:
            with tiles_set_to(tiles):
                return torch.autograd.grad(whiten(x, backend="triton"), x, gradient)

        windows[number] = window_without_launches(step, x.device)
    return {number: spread(samples) for number, samples in take_turns(windows, seconds).items()}


def measure(size: Size, products: list[Tiles], factors: list[Tiles], seconds: float) -> list[dict[str, Any]]:
    """-> tiles and microseconds of each, fastest first; the default ({}) and the best of both kinds together among them."""
    candidates = [{}, *products, *factors]
    times = microseconds(size, candidates, seconds)
    best_products = min(range(len(products)), key=lambda i: times[1 + i]["median"])
    best_factor = min(range(len(factors)), key=lambda i: times[1 + len(products) + i]["median"])
    finals = [{}, products[best_products] | factors[best_factor]]  # timed against each other once more
    last = microseconds(size, finals, seconds / 3)
    lines = [{"tiles": tiles, **times[number]} for number, tiles in enumerate(candidates)][1:]
    lines += [{"tiles": tiles, **last[number]} for number, tiles in enumerate(finals)]
    return sorted(lines, key=lambda line: line["median"])


def run(part: Part) -> int:
    """Compile, try, time; the exit code of the part."""
    grid = TINY if part.tiny else FULL
    unknown = {*grid.products, *grid.factor} - set(whitening_triton._Tiles._fields)
    if unknown:
        return end(part, {}, [f"whitening_triton._Tiles has no {', '.join(sorted(unknown))}: change the grid here"], "")
    products, factors = combinations(grid.products), combinations(grid.factor)
    workers = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        tried = [*products, *factors]
        reasons = list(pool.map(refusal, tried, [grid.sizes] * len(tried)))
    refused = [{"tiles": tiles, "reason": reason} for tiles, reason in zip(tried, reasons, strict=True) if reason]
    products, factors = ([t for t in kind if t not in [r["tiles"] for r in refused]] for kind in (products, factors))
    if not products or not factors:
        return end(part, {"left_out": refused}, [f"no candidate runs; the first: {refused[0]['reason']}"], "")
    results, said = [], []
    for size in grid.sizes:
        lines = measure(size, products, factors, 0.0 if part.tiny else SECONDS)
        results.append({"slices": size[0], "rows": size[1], "size": size[2], "lines": lines})
        default = next(line for line in lines if not line["tiles"])
        print(f"\n{'x'.join(map(str, size))}, default {whitening_triton._tiles(size[2])}")
        rows = [(f"{line['median']:.1f}", _in_words(line["tiles"])) for line in lines]
        print(table([("us", "changed tiles"), *rows]))
        said.append(
            f"{'x'.join(map(str, size))} {default['median']:.0f} -> {lines[0]['median']:.0f} us by {rows[0][1]}"
        )
    for each in refused:
        print(f"left out: {_in_words(each['tiles'])}: {each['reason']}")
    return end(part, {"results": results, "left_out": refused}, [], "; ".join(said))


def _in_words(tiles: Tiles) -> str:
    return " ".join(f"{name}={value}" for name, value in tiles.items()) or "default"


if __name__ == "__main__":
    sys.exit(run(begin(__doc__)))
