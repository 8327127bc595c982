"""Table of the results of a drill: a row for each kind of fault."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """Results of one kind of fault over all tries."""

    fault: str
    injected: str
    expected: str
    tries: int = 0
    strikes: int = 0
    """Number of injected faults."""
    updates_lost: list[int] = field(default_factory=list)
    """For each fault, the number of updates that no checkpoint held."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of the results that were not as expected."""


def lost_updates(run_dir: Path) -> int:
    """Return the number of logged steps beyond the newest checkpoint of a run."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    # A kill may have cut the last line.
    logged = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    checkpoints = (run_dir / "checkpoints").glob("step_*.pt")
    saved = [int(path.stem.removeprefix("step_")) for path in checkpoints]
    return max(logged, default=0) - max(saved, default=0)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows, each as a dict of the fields of `Row`, as a Markdown table."""
    # The columns are fields of `Row`; two of them are counted here.
    lines = [
        "| fault | how injected | tries | strikes | updates made again, mean (most) | should | did not |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        # Faults that end no process lose no updates.
        lost = row["updates_lost"]
        again = f"{sum(lost) / len(lost):.1f} ({max(lost)})" if lost else "none"
        cells = (
            row["fault"],
            row["injected"],
            row["tries"],
            row["strikes"],
            again,
            row["expected"],
            len(row["wrong"]),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
