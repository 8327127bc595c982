"""Measure the time and memory that a rank needs before its first plan, in a fresh process.

    python -m trainer.bench.start_up ROOT SPLIT IMAGES_PER_STEP BEGAN

BEGAN: time.time() just before the process was started. Prints one JSON object: seconds until all imports of a rank are loaded,
seconds from then to the first plan, and the memory in bytes. PSS counts a share of the pages that other processes use as well;
USS counts only the pages of this process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import trainer.setup  # noqa: F401 (loads what a rank imports: torch, timm, DALI)
from trainer.config.schema import ViewsConfig
from trainer.data.index import open_index
from trainer.data.plan import Planner
from trainer.distributed.geometry import images_of_rank
from trainer.distributed.ranks import Ranks


def memory() -> dict[str, int]:
    """Return PSS and USS of this process in bytes."""
    found: dict[str, int] = {}
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    # The first line is a heading; the others are "Name:  SIZE kB".
    for line in lines[1:]:
        name, size, *_ = line.split()
        found[name.rstrip(":")] = 1024 * int(size)
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {"pss": found["Pss"], "uss": private}


def start_up(root: Path, split: str, images_per_step: int, began: float) -> dict[str, float]:
    """Open the index, then draw the order of the epoch and the first plan. Returns seconds and bytes."""
    # The imports are loaded when this function is called.
    imported = time.time()
    before = memory()
    index = open_index(root, split)
    opened = time.time()
    rows = images_of_rank(Ranks(), images_per_step)
    planner = Planner(ViewsConfig(), seed=0, num_images=len(index), images_per_step=images_per_step, images=rows)
    planner.plan(0)
    planned = time.time()
    after = memory()
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
