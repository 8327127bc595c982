"""Measure the time and memory that a rank needs before its first plan, for a set of a given size, in a fresh process.

    python -m trainer.bench.start_up ROOT SPLIT IMAGES_PER_STEP BEGAN

BEGAN: time.time() just before the process was started. Prints one JSON object: seconds until everything that a rank imports is
loaded, then until the first plan, and the memory after each in bytes. PSS counts pages shared with other processes in part; USS
counts only this process's own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import trainer.setup  # noqa: F401 (a rank's imports: torch, timm, DALI)
from trainer.config.schema import ViewsConfig
from trainer.data.index import open_index
from trainer.data.plan import Planner
from trainer.distributed.geometry import images_of_rank
from trainer.distributed.ranks import Ranks


def memory() -> dict[str, int]:
    """Return pss and uss of this process in bytes."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size, *_ = line.split()
        found[name.rstrip(":")] = 1024 * int(size)
    return {"pss": found["Pss"], "uss": found["Private_Clean"] + found["Private_Dirty"]}


def start_up(root: Path, split: str, images_per_step: int, began: float) -> dict[str, float]:
    """Open the index, draw the epoch's order and the first plan. Returns the figures."""
    imported, before = time.time(), memory()
    index = open_index(root, split)
    opened = time.time()
    rows = images_of_rank(Ranks(), images_per_step)
    planner = Planner(ViewsConfig(), seed=0, num_images=len(index), images_per_step=images_per_step, images=rows)
    planner.plan(0)
    planned, after = time.time(), memory()
    return {
        "process": os.getpid(),
        "images": len(index),
        "import_seconds": imported - began,
        "open_seconds": opened - imported,
        "plan_seconds": planned - opened,
        "index_seconds": planned - imported,
        "start_seconds": planned - began,
        **{f"{name}_bytes": after[name] for name in after},
        **{f"index_{name}_bytes": after[name] - before[name] for name in after},
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    print(json.dumps(start_up(Path(words[0]), words[1], int(words[2]), float(words[3]))))
