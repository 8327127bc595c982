"""Running digests of a run: of every row that was trained on, and of every logged mean. Two equal runs have equal digests."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.run.shares import METRICS

_HALF = 2**32
# Values of a line that describe the machine and not the training. Images are skipped some steps before they are due.
_OF_THE_MACHINE = (
    "images_per_s",
    "views_per_s",
    "seconds_per_step",
    "data_wait",
    "eta_seconds",
    "time",
    "memory_gib",
    "memory_limit_gib",
    "skipped_images",
    *METRICS,
)


class Digests:
    """The digests of a run on one rank.

    The ranks' sums of row hashes add up to the digest of the rows, so it does not matter which rank held a row."""

    def __init__(self) -> None:
        self.rows = 0
        """Sum of the hashes of the rows that this rank trained on, modulo 2^64; on rank 0 with all rows before a resume."""
        self.loss = ""
        """Chain of hashes over the logged means, on rank 0."""
        self.since = 0
        """Step with which the digests began; above 0 if an older program made the steps before."""

    def add_rows(self, digest: int) -> None:
        """Add the rows of a step."""
        self.rows = (self.rows + digest) % 2**64

    def put_halves(self, target: Tensor) -> None:
        """Write both halves of the sum to `target` (2,), float64, which holds them exactly, also summed over ranks."""
        high, low = divmod(self.rows, _HALF)
        # fill_ passes the number with the kernel, so that the host does not wait as it would for a copy.
        target[0].fill_(float(high))
        target[1].fill_(float(low))

    def chain(self, line: Mapping[str, Any]) -> str:
        """Add the exact values of a line, a number for each name, to the chain of losses. Returns the chain's new value."""
        chained = hashlib.blake2b(self.loss.encode(), digest_size=8)
        for name in sorted(line):
            # All NaN count as one, because their bits have no meaning.
            value = math.nan if math.isnan(line[name]) else float(line[name])
            # A zero byte separates the name from the number, as no name contains one.
            chained.update(name.encode() + b"\0")
            chained.update(struct.pack("<d", value))
        self.loss = chained.hexdigest()
        return self.loss

    def content(self, halves: Tensor) -> dict[str, Any]:
        """Return the entry of a checkpoint. halves: those of all ranks, on the device."""
        # The product wraps around, as a sum modulo 2^64 does.
        high, low = halves.to(torch.int64).unbind()
        return {
            "rows": high * _HALF + low,
            "loss": self.loss,
            "since": self.since,
        }

    def load(self, content: Mapping[str, Any] | None, step: int, *, is_first: bool) -> None:
        """Continue from the checkpoint of `step`; None: it has no digests, which then begin with this step."""
        if content is None:
            self.rows = 0
            self.loss = ""
            self.since = step
            return
        # The digest of all ranks must count once, so only the first rank continues it.
        self.rows = int(content["rows"]) % 2**64 if is_first else 0
        self.loss = content["loss"]
        self.since = content["since"]


WANTED: dict[str, Any] = {
    "rows": torch.zeros((), dtype=torch.int64),
    "loss": str,
    "since": int,
}
"""Structure of the entry of a checkpoint."""


def join_halves(high: float, low: float) -> str:
    """Return the digest of the rows as 16 hexadecimal digits. high, low: halves, each summed over ranks."""
    # The sum of the lower halves may carry into the upper ones.
    digest = (int(high) * _HALF + int(low)) % 2**64
    return f"{digest:016x}"


def training_values(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line of metrics.jsonl that equal runs have in common, without the chain of losses."""
    ignored = (*_OF_THE_MACHINE, "loss_digest")
    return {name: value for name, value in line.items() if name not in ignored}


def first_different(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the name of the first value in which two lines differ: rows, then loss, then the others; None if they are equal.

    Only values that both lines have are compared."""
    ours = training_values(before)
    theirs = training_values(now)
    # If the rows differ, everything else follows from that.
    for name in ("rows_digest", "loss", *ours):
        if name in ours and name in theirs and ours[name] != theirs[name]:
            return name
    return None
