"""Options of `wmse diff`, and its exit codes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.printable import printable
from trainer.errors import BAD_INPUT, DONE, FAILED

if TYPE_CHECKING:
    from trainer.diff.compare import Comparison


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run_a",
        type=Path,
        metavar="RUN_A",
        help="run folder, finished, running or killed",
    )
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="the other run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def run_diff(options: argparse.Namespace) -> int:
    """Print the comparison. Returns 0 if the runs are identical, 1 if they differ, 2 if nothing can be compared."""
    from trainer.diff.compare import compare_runs, describe
    from trainer.diff.sides import read_side
    from trainer.run.folder import start_logging

    # The log goes to stderr, so that stdout holds the comparison alone.
    start_logging(None, 0)
    a = read_side("A", options.run_a)
    b = read_side("B", options.run_b)
    found = compare_runs(a, b)
    if options.json:
        print(json.dumps(_as_json(found), indent=1))
    else:
        for line in describe(a, b, found):
            # Names in files may hold control characters.
            print(printable(line))
    if found.is_different:
        return FAILED
    return BAD_INPUT if found.nothing_compared else DONE


def _as_json(found: Comparison) -> dict[str, Any]:
    weights = found.weights
    return {
        "settings": found.settings,
        "environment": found.environment,
        "data": found.data,
        "metrics": found.metrics,
        "row": found.row._asdict() if found.row else None,
        "checkpoints": {
            "common": weights.common,
            "identical": weights.identical,
            "different": weights.different,
            "tensors": [tensor._asdict() for tensor in weights.tensors],
        },
        "notes": found.notes,
        "identical_to": found.identical_to,
        "parts_at": found.parts_at,
        "verdict": found.verdict(),
    }
