"""Draws the result of `wmse bench loss --sweep --out RESULT.json`, measured before: `--plot` draws while measuring.

    python benchmarks/plot_loss.py RESULT.json OUT.png

Cost of the whitening against the number, the size and the rows of slices, a panel each, a line for each backend, both axes
logarithmic; the band is from the first to the third quartile.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trainer.bench.plot import draw


def main() -> None:
    """Read, draw, say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("out", type=Path)
    own = parser.parse_args()
    result = json.loads(own.result.read_text())
    if result.get("bench") != "whitening_sweep":
        parser.error(f"{own.result} is no sweep: make one with wmse bench loss --sweep --out FILE")
    draw(result, own.out)
    print(own.out)


if __name__ == "__main__":
    main()
