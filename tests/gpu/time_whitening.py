"""Time of the whitening alone, forward and backward: python -m tests.gpu.time_whitening OUT.json [--tiny]

Each variant called from Python, and as a CUDA graph, which leaves the device's own time; the loop of the authors' code, which
waits for the device in every slice, only from Python. 4 and 64 slices of 256 x 128: a rank's step of the ImageNet recipe on
16 ranks, and on one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from kernels.whitening import whiten
from tests.gpu.part import Part, begin, end, in_words, table, window_without_launches
from trainer.bench.implementations import loop_whiten
from trainer.bench.timing import spread, take_turns, timed

SIZES = ((4, 256, 128), (64, 256, 128))  # slices, rows, embedding size
TARGETS = {4: 150.0, 64: 400.0}  # slices -> most microseconds that the best variant may take as a graph, on an H100
LOOP_TARGET = 20.0  # the loop takes at least so many times as long
SECONDS = 4.0  # of measuring each size
VARIANTS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "torch, float64 factor": {"backend": "torch", "float64_factor": True},
    "triton": {"backend": "triton"},
}

Figures = dict[str, dict[str, dict[str, float]]]  # variant -> "eager" or "graph" -> median, quartiles, windows


def measure(size: tuple[int, int, int], device: torch.device, seconds: float) -> tuple[Figures, list[str]]:
    """-> microseconds of one forward and backward, and what went wrong."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator).to(device).requires_grad_()
    gradient = torch.randn(size, generator=generator).to(device)
    steps = {name: _step(x, gradient, keywords) for name, keywords in VARIANTS.items()}
    steps["loop"] = _loop_step(x, gradient)
    ways = {"eager": timed, "graph": window_without_launches}
    windows, problems = {}, []
    for name, how in [(name, how) for name in steps for how in ways if (name, how) != ("loop", "graph")]:
        try:
            window = ways[how](steps[name], device)
            window(1)
            windows[name, how] = window
        except Exception as error:  # the others are still measured
            problems.append(f"{size[0]} slices, {name}, {how}: {in_words(error)}")
    figures: Figures = {}
    for (name, how), samples in take_turns(windows, seconds).items():
        figures.setdefault(name, {})[how] = spread(samples)
    return figures, problems


def _step(x: torch.Tensor, gradient: torch.Tensor, keywords: dict[str, Any]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(whiten(x, **keywords), x, gradient)


def _loop_step(x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
    v = x.detach().flatten(0, 1).requires_grad_()
    rows_of_slices = torch.arange(len(v), device=v.device).view(len(x), -1).unbind()
    return lambda: torch.autograd.grad(loop_whiten(v, rows_of_slices), v, gradient.flatten(0, 1))


def judge(slices: int, figures: Figures) -> tuple[str, list[str]]:
    """-> one line about a size, and the targets that it misses."""
    graphs = {name: both["graph"]["median"] for name, both in figures.items() if "graph" in both}
    if not graphs or "loop" not in figures:
        return f"{slices} slices: not measured", []
    best = min(graphs, key=graphs.__getitem__)
    times_loop = figures["loop"]["eager"]["median"] / graphs[best]
    line = f"{slices} slices: {best} {graphs[best]:.0f} us, loop {times_loop:.0f} times that"
    missed = []
    if graphs[best] > TARGETS[slices]:
        missed.append(f"{line}; the target is {TARGETS[slices]:.0f} us")
    if times_loop < LOOP_TARGET:
        missed.append(f"{line}; the target is {LOOP_TARGET:.0f} times")
    return line, missed


def run(part: Part) -> int:
    """Measure, hold against the targets; the exit code of the part."""
    sizes = ((1, 5, 2),) if part.tiny else SIZES
    rows, results, said, problems = [("slices", "variant", "called from Python, us", "CUDA graph, us")], [], [], []
    for size in sizes:
        figures, wrong = measure(size, part.device, 0.1 if part.tiny else SECONDS)
        problems += wrong
        results.append({"slices": size[0], "rows": size[1], "size": size[2], "figures": figures})
        rows += [
            (str(size[0]), name, *(_cell(both.get(how)) for how in ("eager", "graph")))
            for name, both in figures.items()
        ]
        if not part.tiny:
            line, missed = judge(size[0], figures)
            said.append(line)
            problems += missed
    print(table(rows))
    return end(part, {"unit": "microseconds", "results": results}, problems, "; ".join(said) or "rehearsed, no targets")


def _cell(figure: dict[str, float] | None) -> str:
    return f"{figure['median']:.0f} ({figure['quartile_1']:.0f}-{figure['quartile_3']:.0f})" if figure else "-"


if __name__ == "__main__":
    sys.exit(run(begin(__doc__)))
