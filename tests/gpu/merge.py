"""All results of a run of run.sh in one file: python tests/gpu/merge.py OUT PART... writes OUT/results.json."""

import json
import sys
from pathlib import Path


def merge(folder: Path, parts: list[str]) -> dict[str, object]:
    """Part -> its figures, of the parts that left some; one that was stopped while writing is named instead."""
    found: dict[str, object] = {}
    for part in parts:
        path = folder / f"{part}.json"
        if path.exists():
            try:
                found[part] = json.loads(path.read_text())
            except ValueError as error:
                found[part] = {"unreadable": str(error)}
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "results.json").write_text(json.dumps(merge(folder, sys.argv[2:]), indent=1) + "\n")
