"""Images that can't be used: each named once, counted, and written down so that a resumed run knows them.

RUN_DIR/quarantine.jsonl, one JSON object a line, appended by all ranks:
    step (whose images were being prepared), id (of the image in the index), image (its name), problem, rank (that found it)
A resumed run takes over the entries of the steps before its first one: those shaped what was learnt. What later steps
found, it finds again where it is still so.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.data.index import Index
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.files import write_text

FEWEST_BAD = 10  # bad images, below which no share stops a run: a few bad files of a small set are no reason to
FEWEST_FOUND = 100  # bad images found by one rank, below which the share of those it read says too little

_log = logging.getLogger(__name__)


@dataclass
class BadImages:
    """The images of a set that this rank can't use. Safe to use from many threads.

    known: {id: name} that a resumed run begins with (`read_quarantine`); quarantine: the file that new ones are appended to,
    None: they are only logged. Raises InputError where already those known are too many.
    """

    index: Index
    max_share: float
    known: Mapping[int, str] = field(default_factory=dict)
    quarantine: Path | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        count = len(self.index)
        self.ids = {i for i, name in self.known.items() if i < count and self.index.name(i) == name}
        if len(self.ids) < len(self.known):
            stale = len(self.known) - len(self.ids)
            _log.warning("%s: ignored %d entries that do not match this set", self.quarantine, stale)
        self.images_read = 0
        self._known = len(self.ids)
        self._lock = threading.Lock()  # two readers may come upon one bad image, as its own and as a replacement
        self._stop_where_too_many(f"all named in {self.quarantine}")

    def add(self, image_id: int, problem: str, step: int) -> None:
        """Name the image, once. Raises InputError where too many are bad."""
        with self._lock:
            if image_id in self.ids:
                return
            self.ids.add(image_id)
            self.images_read += 1  # the image that takes its place
        name, problem = self.index.name(image_id), printable(problem)
        _log.warning("can't use %s: %s; the next image of the set takes its place", printable(name), problem)
        if self.quarantine is not None:
            entry = {"step": step, "id": image_id, "image": name, "problem": problem, "rank": self.rank}
            _append(self.quarantine, entry)
        self._stop_where_too_many(f"the last {name}: {problem}")

    def _stop_where_too_many(self, what: str) -> None:
        bad, found = len(self.ids), len(self.ids) - self._known
        if bad >= FEWEST_BAD and bad > self.max_share * len(self.index):
            counts, share = f"{bad} of the {len(self.index)} images of the set", bad / len(self.index)
        elif found >= FEWEST_FOUND and found > self.max_share * self.images_read:
            # those of earlier runs are left out: the images that were read then are not counted
            counts, share = f"{found} of the {self.images_read} images read so far", found / max(self.images_read, 1)
        else:
            return
        raise InputError(
            f"{counts} can't be used ({share:.2%}, more than data.max_skipped_share {self.max_share:.2%}), {what}. "
            f"`wmse check-data {printable(str(self.index.root))}` names every bad file: repair them or raise "
            "data.max_skipped_share"
        )


def read_quarantine(path: Path, first_step: int) -> dict[int, str]:
    """{id: name} of the images that were found bad, by any rank, in steps before `first_step`. Empty where there is no file.

    A line that is not an entry (torn, because a process was killed) is ignored with a warning."""
    return {entry["id"]: entry["image"] for entry in _entries_before(path, first_step)}


def drop_quarantine_after(path: Path, first_step: int) -> None:
    """Keep the entries of steps before `first_step`, each image once: the others will be written again.

    For the first rank, before any rank appends. A file that needs no change is left alone."""
    kept = "".join(_line(entry) for entry in _entries_before(path, first_step))
    if path.exists() and path.read_bytes() != kept.encode():
        write_text(path, kept)


def _entries_before(path: Path, first_step: int) -> list[dict[str, Any]]:
    """In the file's order; of several about one image the first."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    entries: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        entry = _parse(line)
        if entry is None:
            _log.warning("%s: ignored line %d, which is torn or not an entry", path, number)
        elif entry["step"] < first_step:
            entries.setdefault(entry["id"], entry)
    return list(entries.values())


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        numbers, texts = [entry["step"], entry["id"]], [entry["image"], entry["problem"]]
    except (ValueError, KeyError, TypeError, RecursionError):  # RecursionError: deeply nested brackets
        return None
    sound = all(type(n) is int and n >= 0 for n in numbers) and all(isinstance(text, str) for text in texts)
    return entry if sound else None


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry) + "\n"  # ASCII: a name may hold what UTF-8 can't


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    """One write to the end of the file: lines of several ranks do not mix. (On NFS two nodes may tear each other's line;
    its image is then found again.) A run does not end for a line that could not be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, _line(entry).encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("can't write %s (%s): a resumed run will have to find %s again", path, error, entry["image"])
