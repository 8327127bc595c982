"""Code that the parts share: command line, recording of lines, and checks that use CUDA."""

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
"""A figure or a check. name: its subject; said: the result in words; problem: what is wrong, if anything; others: figures."""


class Task(NamedTuple):
    """The arguments of a part."""

    words: list[str]
    device: torch.device
    tiny: bool


def main(measure: Callable[[Task], Iterator[Line]], description: str | None) -> None:
    """Run a part as a program: OUT.json [WORD...] [--tiny]."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny sizes, without a GPU")
    own = parser.parse_args()
    if not own.tiny and not torch.cuda.is_available():
        print("skipped: this part needs a GPU; --tiny rehearses on a CPU")
        sys.exit(SKIPPED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = measure(Task(own.words, device, own.tiny))
    sys.exit(record(lines, own.out, device))


def record(lines: Iterator[Line], out: Path, device: torch.device) -> int:
    """Print each line and write all lines to `out` after each, so that a stopped part loses none. Returns the exit code."""
    head = provenance(device)
    found: list[Line] = []

    def note(line: Line) -> None:
        found.append(line)
        text = f"{line['name']:<40} {line.get('said', '')}  {line.get('problem', '')}"
        print(text.rstrip(), flush=True)
        # Write a temporary file and rename it: a part may be killed while it writes.
        temporary = out.with_suffix(".part")
        content = json.dumps({**head, "lines": found}, indent=1)
        temporary.write_text(content + "\n")
        temporary.rename(out)

    try:
        for line in lines:
            note(line)
    except Exception as error:
        # For example, a kernel may leave the GPU unusable.
        note({"name": "what follows", "problem": describe(error)})
    problems = [f"{line['name']}: {line['problem']}" for line in found if line.get("problem")]
    said = "; ".join(f"{line['name']} {line['said']}" for line in found if line.get("said"))
    # The last line of the output becomes the part's line in the table.
    if problems:
        print(f"{len(problems)} problem(s): {problems[0]}; {said}")
        return 1
    print(said or f"{len(found)} checks passed")
    return 0


def attempt(name: str, check: Callable[[], Line]) -> Line:
    """Return a check's line. An error becomes the problem of this check, and the next checks still run."""
    try:
        return {"name": name, **check()}
    except Exception as error:
        return {"name": name, "problem": describe(error)}


def describe(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    first_line, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first_line}"


def without_waiting(step: Callable[[], Any], device: torch.device) -> Any:
    """Return step(). Raises RuntimeError if something in it waits for the device."""
    if device.type != "cuda":
        return step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call of `step` as a CUDA graph. Returns the graph and the result, which every replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The first calls compile and allocate, which is not allowed in a capture.
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = step()
    return graph, returned
