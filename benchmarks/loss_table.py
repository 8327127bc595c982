"""Prints the result of `wmse bench loss --out RESULT.json` as the table of docs/performance.md.

python benchmarks/loss_table.py RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def rows(result: dict[str, Any]) -> list[str]:
    """One line of Markdown for each shape and implementation: times in microseconds, medians (quartiles)."""
    lines = [
        "| d, N, M, k, iterations | | forward | backward | both | times loop | operators | MB moved | MB saved | times floor |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in result["results"]:
        sizes = ", ".join(str(size) for size in entry["shape"].values())
        for name, modes in entry["figures"].items():
            cost, both = entry["costs"][name], modes["forward_backward"]
            cells = [
                sizes,
                name,
                f"{modes['forward']['median']:,.0f}",
                f"{modes['backward']['median']:,.0f}",
                f"{both['median']:,.0f} ({both['quartile_1']:,.0f}-{both['quartile_3']:,.0f})",
                f"{both['speedup_over_loop']:.2f}",
                f"{cost.get('launches', cost['operators']):,}",
                f"{cost['bytes'] / 1e6:.1f}",
                f"{cost['saved_bytes'] / 1e6:.2f}",
                f"{cost['times_floor']:.1f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            sizes = ""
    return lines


if __name__ == "__main__":
    print("\n".join(rows(json.loads(Path(sys.argv[1]).read_text()))))
