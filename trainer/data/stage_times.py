"""Seconds that the loader's threads spend in each stage, to tell which one a training loop waits for."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Waits(NamedTuple):
    """Seconds that a loop has waited for each stage of the loader."""

    reader: float  # bytes from disk or network
    checker: float  # checks of the bytes, conversion by Pillow, inputs of DALI's graph
    decoder: float  # NaN: the time is in `views`
    views: float


class StageTimes:
    """Sums of seconds by stage since the last `take`. Safe to use from many threads."""

    def __init__(self) -> None:
        # Each thread only adds to its own entries, so no lock is needed.
        self._spent: dict[tuple[int, str], float] = {}
        self._taken: dict[str, float] = defaultdict(float)

    @contextmanager
    def spend(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            key = threading.get_ident(), stage
            self._spent[key] = self._spent.get(key, 0.0) + time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call, summed over threads; 0 for any other name."""
        totals: dict[str, float] = defaultdict(float)
        # copy() is atomic, so no thread can change the dictionary while it is read.
        for (_, stage), seconds in self._spent.copy().items():
            totals[stage] += seconds
        since = defaultdict(float, {stage: total - self._taken[stage] for stage, total in totals.items()})
        self._taken = totals
        return since


def split_waits(
    for_inputs: float, for_views: float, spent: dict[str, float], *, decodes_in_readers: bool, decode_share: float
) -> Waits:
    """Divide the waits of a loop among the stages.

    for_inputs: seconds that DALI, and so the loop, waited for its inputs. for_views: other seconds that the loop waited for
    DALI. spent: from `StageTimes.take`: "images" and "arrays" of the one thread that prepares steps, the first of which waits
    for the "read", "check" and "decode" of the reader threads. decode_share: the decoder's part of DALI's time, NaN if unknown.
    """
    of_readers = spent["read"] + spent["check"] + spent["decode"]
    prepared = spent["images"] + spent["arrays"]
    # The readers' part of the wait is divided as their time is. Without any known time, the wait is the readers'.
    for_images = for_inputs * spent["images"] / prepared if prepared else for_inputs
    reading = for_images * spent["read"] / of_readers if of_readers else for_images
    decoding = for_images * spent["decode"] / of_readers if of_readers else 0.0
    checking = for_inputs - reading - decoding
    if decodes_in_readers:
        return Waits(reading, checking, decoding, for_views)
    # A share that is not known leaves the decoder's time with the views.
    decoder = for_views * decode_share
    return Waits(reading, checking, decoder, for_views if decoder != decoder else for_views - decoder)
