"""Shares of a run's time: computation, waits for the loader's stages, checkpoints, the loop's own work, the slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.metric import Metric

_NAMED_LOSS = 0.02  # smallest share that the log line names
_CAUSES = ("reader", "checker", "decoder", "views", "checkpoint", "host", "slowest", "beside")
METRICS = {
    "compute_views_per_s": Metric("speed"),
    "compute_share": Metric("speed", "compute {:.0%}{held_back}"),
    **{f"lost_{cause}": Metric("lost") for cause in _CAUSES},
    "slowest_rank": Metric(),
}
"""Metrics of every run, by their names in metrics.jsonl."""


class RankPace(NamedTuple):
    """Sums of a rank over the steps since the last logged line. NaN: not known."""

    views_per_step: float = 0.0  # of this rank
    steps: float = 0.0
    seconds: float = 0.0  # of these steps, with all that came between them
    alone: float = np.nan  # seconds of a step while the loader rests
    alone_forward: float = np.nan  # seconds of its forward
    forward: float = 0.0  # seconds of the forward of all these steps
    # Seconds in which the device had nothing to do: waits for the loader's stages, and the loop's own work.
    reader: float = 0.0
    checker: float = 0.0
    decoder: float = 0.0
    views: float = 0.0
    checkpoint: float = 0.0
    host: float = 0.0


def unknown_shares() -> dict[str, Any]:
    """Return the values of `measure_shares` if none is known: NaN."""
    return dict.fromkeys(METRICS, np.nan)


def measure_shares(rows: NDArray[np.float64], longest_delays: float) -> dict[str, Any]:
    """Return the values of a line about its pace, by their names in metrics.jsonl; NaN where one is not known.

    rows: the `RankPace` of each rank, (ranks, n). longest_delays: seconds, the longest `Pace.delay` of the ranks in each step,
    summed over steps."""
    found = unknown_shares()
    ranks = [RankPace(*row) for row in rows.tolist()]
    if any(np.isnan(rank.alone) or not rank.steps for rank in ranks):
        return found
    losses = rows[:, RankPace._fields.index("reader") :]
    known_losses = np.nan_to_num(losses)
    forward = np.nan_to_num([rank.forward for rank in ranks]).tolist()
    slowest = int(np.argmax(known_losses.sum(1) + forward))
    seconds = ranks[slowest].seconds
    # All ranks wait for the slowest in the measured steps, too. What counts is a step of the usual rank.
    alone_forward = [rank.alone_forward for rank in ranks]
    usual_alone = statistics.median_low(alone_forward)  # of two ranks the faster one is the usual one
    names_ranks = usual_alone > 0  # not if it is unknown
    alone = ranks[slowest].alone * (usual_alone / max(alone_forward) if names_ranks else 1.0)
    compute = alone * ranks[slowest].steps

    # The time in which the slowest rank had nothing to do is measured, so it counts before the few steps alone.
    own = known_losses[slowest]
    left = max(seconds - own.sum() - compute, 0.0)
    # Ranks that come late in turn delay all steps, though each of them is late in a few only.
    host = RankPace._fields.index("host") - RankPace._fields.index("reader")
    in_turn = min(max(longest_delays - own[:host].sum(), 0.0), left)
    of_all = known_losses[:, :host].sum(0)
    if of_all.sum():
        own[:host] += in_turn * of_all / of_all.sum()
        left -= in_turn
    # A forward that is slower than the usual one stands for the whole step of its rank.
    slow = 0.0
    if names_ranks:
        longer = max(forward) - statistics.median_low(forward)
        slow = min(alone * longer / usual_alone, left)
    lost = [*own, slow, left - slow]
    for cause, amount in zip(_CAUSES, lost, strict=True):
        found[f"lost_{cause}"] = round(amount / seconds, 4)
    found["compute_share"] = round(1 - sum(found[f"lost_{cause}"] for cause in _CAUSES), 4)
    found["compute_views_per_s"] = round(sum(rank.views_per_step for rank in ranks) / alone, 3)
    if np.isnan(losses).any():
        found["lost_decoder"] = np.nan
    if len(ranks) > 1:
        found["slowest_rank"] = slowest
    else:
        found["lost_slowest"] = np.nan
    return found


def describe_loss(values: Mapping[str, Any]) -> str:
    """Return the largest loss of a line of metrics.jsonl in brackets; empty if it is small or if none is known."""
    losses = {cause: values.get(f"lost_{cause}") or 0.0 for cause in _CAUSES}
    largest = max(losses, key=lambda cause: losses[cause])
    if losses[largest] < _NAMED_LOSS:
        return ""
    name = largest
    if largest == "views" and values.get("lost_decoder") is None:
        name = "decoder and views"
    if largest == "slowest":
        name = f"slowest rank {values.get('slowest_rank')}"
    return f" ({name} {losses[largest]:.0%})"
