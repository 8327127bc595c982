"""What the parts share: their device, and how each line reaches the disk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.gpu.__main__ import SKIPPED
from trainer.run.machine import provenance

Line = dict[str, Any]
"""A figure or a check. name: of what; said: in words; problem: what is wrong, if anything is; the rest is figures for JSON."""


class Task(NamedTuple):
    """What a part is given."""

    words: list[str]
    device: torch.device
    tiny: bool


def main(measure: Callable[[Task], Iterator[Line]], description: str | None) -> None:
    """Run a part as a program: OUT.json [WORD...] [--tiny]."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny sizes; needs no GPU")
    own = parser.parse_args()
    if not own.tiny and not torch.cuda.is_available():
        print("skipped: needs a GPU; --tiny rehearses on a CPU")
        sys.exit(SKIPPED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sys.exit(record(measure(Task(own.words, device, own.tiny)), own.out, device))


def record(lines: Iterator[Line], out: Path, device: torch.device) -> int:
    """Print each line and write all to `out` as they come, so that a part that is stopped loses none. Returns the exit code."""
    head = provenance(device)
    found: list[Line] = []

    def note(line: Line) -> None:
        found.append(line)
        print(f"{line['name']:<40} {line.get('said', '')}  {line.get('problem', '')}".rstrip(), flush=True)
        whole = out.with_suffix(".part")
        whole.write_text(json.dumps({**head, "lines": found}, indent=1) + "\n")
        whole.rename(out)

    try:
        for line in lines:
            note(line)
    except Exception as error:  # for example of a GPU that a kernel left broken
        note({"name": "what follows", "problem": describe(error)})
    problems = [f"{line['name']}: {line['problem']}" for line in found if line.get("problem")]
    said = "; ".join(f"{line['name']} {line['said']}" for line in found if line.get("said"))
    print(f"{len(problems)} problem(s): {problems[0]}; {said}" if problems else said or f"{len(found)} checks passed")
    return 1 if problems else 0


def attempt(name: str, check: Callable[[], Line]) -> Line:
    """Return a check's line; an error is a problem of this check alone."""
    try:
        return {"name": name, **check()}
    except Exception as error:
        return {"name": name, "problem": describe(error)}


def describe(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def without_waiting(step: Callable[[], Any], device: torch.device) -> Any:
    """Call it; torch raises RuntimeError if something waits for the device."""
    if device.type != "cuda":
        return step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call of `step` as a CUDA graph. Returns the graph, and the call's result, which a replay writes anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # first calls compile and allocate, which no capture allows
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = step()
    return graph, returned
