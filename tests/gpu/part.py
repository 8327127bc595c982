"""What the parts of run.sh share: their device, CUDA graphs, and how a part ends."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from trainer.bench.timing import Window, timed
from trainer.machine import provenance

SKIPPED = 77  # exit code that run.sh takes for "cannot run here"


class Part(NamedTuple):
    """Where the result goes, what is measured, and whether this is only the rehearsal."""

    out: Path
    device: torch.device
    tiny: bool


def begin(description: str | None, words: Sequence[str] | None = None) -> Part:
    """From the command line: OUT.json [--tiny]. Ends the program as skipped where there is no GPU and none is rehearsed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny sizes; needs no GPU")
    own = parser.parse_args(words)
    if not own.tiny and not torch.cuda.is_available():
        skip("needs a GPU; --tiny rehearses on a CPU")
    return Part(own.out, torch.device("cuda" if torch.cuda.is_available() else "cpu"), own.tiny)


def skip(reason: str) -> NoReturn:
    """End the program as one that cannot run here."""
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def end(part: Part, result: dict[str, Any], problems: Sequence[str], summary: str) -> int:
    """Write the result, say what went wrong, then one line for run.sh's table -> exit code."""
    part.out.write_text(json.dumps({**provenance(part.device), **result, "problems": list(problems)}, indent=1) + "\n")
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{len(problems)} problem(s): {problems[0]}" if problems else summary)
    return 1 if problems else 0


def in_words(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """One call of `step` as a CUDA graph -> graph, what the call returned (a replay writes it anew). It is called before,
    since first calls compile, allocate and make the handles of libraries, which no capture allows."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = step()
    return graph, returned


def window_without_launches(step: Callable[[], Any], device: torch.device) -> Window:
    """Replays of `step` as a CUDA graph, so that launching it from Python is not in the time; on a CPU plain calls."""
    return timed(capture(step)[0].replay if device.type == "cuda" else step, device)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
