"""Measures which backend of the whitening is fastest at which size, for `backend="auto"`.

    python benchmarks/whitening_backends.py [--seconds S] [--device cpu|cuda] [--out FILE]

One forward and backward of `whiten` by every backend that runs on the device, in windows that take turns, over a grid of slices
B and sizes k with M = 2k rows. Writes a table of medians to kernels/backends_DEVICE_TYPE.json, which
kernels/backends.py reads. Cells that are too large for the memory or the time are left out, and listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the wmse command does, before torch is loaded

import torch

from trainer.bench.implementations import drop_refusing, runnable_backends
from trainer.bench.sweep import WhiteningSize, whitening_steps
from trainer.bench.timing import MIN_WINDOWS, take_turns, timed
from trainer.files import write_text
from trainer.run.machine import provenance

SLICES = (1, 4, 16, 64, 256)
SIZES = (8, 16, 32, 64, 128, 256, 512)  # with M = 2k rows, as in the paper
MAX_INPUT_BYTES = 128 * 2**20  # x of a cell; the reference backend holds about ten times that
CALLS_AT_LEAST = MIN_WINDOWS + 3  # of each backend in a cell: one tries it, two set it up, the rest are measured


def measure(device: torch.device, seconds: float, slices: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    """-> the table: provenance, "cells" with microseconds of each backend and the fastest, "left_out" with reasons.

    Each cell has an equal share of `seconds`. A cell is left out where the same size with fewer slices tells that even the
    least number of calls would take more than three shares.
    """
    backends, not_run = runnable_backends(device)
    share = seconds / (len(slices) * len(sizes))
    cells, left_out = [], []
    for size in sizes:
        one_turn = 0.0  # seconds that one call of every backend takes, for one slice
        for count in sorted(slices):
            at = WhiteningSize(count, 2 * size, size)
            reason = _too_large(at, one_turn * count, share)
            if reason:
                left_out.append({**at._asdict(), "reason": reason})
                continue
            cells.append(_measure_cell(at, device, share, backends))
            one_turn = sum(cells[-1]["microseconds"].values()) / 1e6 / count
    return {
        "device_type": device.type,
        **provenance(device),
        "unit": "microseconds of one forward and backward, median",
        "not_run": not_run,
        "cells": cells,
        "left_out": left_out,
    }


def _too_large(at: WhiteningSize, one_turn: float, share: float) -> str | None:
    num_bytes = at.slices * at.rows * at.size * 4
    if num_bytes > MAX_INPUT_BYTES:
        return f"x has {num_bytes >> 20} MiB, more than {MAX_INPUT_BYTES >> 20}"
    if CALLS_AT_LEAST * one_turn > 3 * share:
        return f"about {CALLS_AT_LEAST * one_turn:.1f} s, with a share of {share:.1f} s a cell: give more --seconds"
    return None


def _measure_cell(at: WhiteningSize, device: torch.device, share: float, backends: Sequence[str]) -> dict[str, Any]:
    steps = whitening_steps(at, device, backends)
    refused = drop_refusing(steps)
    samples = take_turns({name: timed(step, device) for name, step in steps.items()}, share)
    microseconds = {name: round(statistics.median(values), 1) for name, values in samples.items()}
    cell = {**at._asdict(), "microseconds": microseconds, "fastest": min(microseconds, key=microseconds.__getitem__)}
    return {**cell, "refused": refused} if refused else cell


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write, say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (default 60)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="default kernels/backends_DEVICE_TYPE.json")
    parser.add_argument("--slices", type=int, nargs="+", default=SLICES, metavar="B")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="K")
    own = parser.parse_args(words)
    table = measure(torch.device(own.device), own.seconds, own.slices, own.sizes)
    out = own.out or Path(__file__).parents[1] / "kernels" / f"backends_{own.device}.json"
    write_text(out, json.dumps(table, indent=1) + "\n")
    print(out)


if __name__ == "__main__":
    main()
