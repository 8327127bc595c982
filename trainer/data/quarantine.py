"""Skipped images: each is logged once, counted, and recorded so that a resumed run knows it.

All ranks append to RUN_DIR/quarantine.jsonl, one JSON object on each line:

    step     the step whose images were being prepared
    id       the image's number in the index
    image    its name
    problem  why it cannot be used
    rank     the rank that found it

A resumed run keeps the entries of the steps before its first step, because they determined the images that were trained on. It
drops later entries and finds those images again if they still cannot be used.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.data.index import Index
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.files import parse_object, write_text

FEWEST_SKIPPED = 10  # fewer skipped images never stop a run: a few bad files in a small data set are no reason to stop
FEWEST_FOUND = 100  # if one rank found fewer skipped images, their share of the images it read says too little

_log = logging.getLogger(__name__)


@dataclass
class SkippedImages:
    """The skipped images of a data set on this rank. Safe to use from many threads.

    max_share: largest share of skipped images, see data.max_skipped_share.
    known: {id: name} of the images that a resumed run skips from the start (`read_quarantine`).
    quarantine: the file that new entries are appended to; None: skipped images are only logged.
    Raises InputError if the known images alone are too many.
    """

    index: Index
    max_share: float
    known: Mapping[int, str] = field(default_factory=dict)
    quarantine: Path | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        # An entry counts only if the index still has an image of that name under that number.
        self.ids = {i for i, name in self.known.items() if self._is_in_index(i, name)}
        stale = len(self.known) - len(self.ids)
        if stale > 0:
            _log.warning("%s: ignored %d entries that do not match this set", self.quarantine, stale)
        # The loader counts the images that it asks for.
        self.images_read = 0
        self._num_known = len(self.ids)
        self._lock = threading.Lock()  # two readers may find the same image, one of them as a replacement
        self._check_share(f"all named in {self.quarantine}")

    def _is_in_index(self, image_id: int, name: str) -> bool:
        return image_id < len(self.index) and self.index.name(image_id) == name

    def add(self, image_id: int, problem: str, step: int) -> None:
        """Log and record a skipped image, once. Raises InputError if too many images are skipped."""
        with self._lock:
            # Another reader may have found it first.
            if image_id in self.ids:
                return
            self.ids.add(image_id)
            self.images_read += 1  # its replacement is read as well
        name = self.index.name(image_id)
        problem = printable(problem)
        _log.warning("skipped %s: %s; the next image of the set replaces it", printable(name), problem)
        # Record it for a resumed run.
        if self.quarantine is not None:
            entry = {
                "step": step,
                "id": image_id,
                "image": name,
                "problem": problem,
                "rank": self.rank,
            }
            _append(self.quarantine, entry)
        self._check_share(f"the last {name}: {problem}")

    def _check_share(self, examples: str) -> None:
        """Raise InputError if too large a share of the data set, or of the images that this rank has read, is skipped."""
        skipped = len(self.ids)
        # Images that earlier runs found do not count here, because the images that those runs read are not known.
        found = skipped - self._num_known
        if skipped >= FEWEST_SKIPPED and skipped > self.max_share * len(self.index):
            counts = f"{skipped} of the {len(self.index)} images of the set"
            share = skipped / len(self.index)
        elif found >= FEWEST_FOUND and found > self.max_share * self.images_read:
            counts = f"{found} of the {self.images_read} images read so far"
            share = found / max(self.images_read, 1)
        else:
            return
        root = printable(str(self.index.root))
        raise InputError(
            f"{counts} cannot be used ({share:.2%}, more than data.max_skipped_share {self.max_share:.2%}), {examples}. "
            f"`wmse check-data {root}` names every bad file: repair them or raise data.max_skipped_share"
        )


def read_quarantine(path: Path, first_step: int) -> dict[int, str]:
    """Return {id: name} of the images that any rank skipped in steps before `first_step`; empty if there is no file.

    A line that is not an entry, for example because a process was killed while writing it, is ignored with a warning.
    """
    return {entry["id"]: entry["image"] for entry in _entries_before(path, first_step)}


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return all entries in the file's order, each image once; empty if the file does not exist."""
    return _entries_before(path, sys.maxsize)


def drop_quarantine_after(path: Path, first_step: int) -> None:
    """Keep the entries of steps before `first_step`, each image once; later entries will be written again.

    Only the first rank calls this, before any rank appends. The file is not written if it needs no change.
    """
    kept = "".join(_line(entry) for entry in _entries_before(path, first_step))
    if path.exists() and path.read_bytes() != kept.encode():
        write_text(path, kept)


def _entries_before(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Return the entries in the file's order; if several are about the same image, only the first."""
    # Reading a named pipe would wait for ever.
    lines = path.read_bytes().splitlines() if path.is_file() else []
    entries: dict[int, dict[str, Any]] = {}
    # A torn line, or one that a user edited, must not stop a run.
    for number, line in enumerate(lines, 1):
        entry = _parse(line)
        if entry is None:
            _log.warning("%s: ignored line %d, which is torn or not an entry", path, number)
        elif entry["step"] < first_step:
            entries.setdefault(entry["id"], entry)
    return list(entries.values())


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line, or None if the line is torn or not an entry."""
    entry = parse_object(line)
    for key in ("step", "id"):
        value = entry.get(key)
        if type(value) is not int or value < 0:
            return None
    for key in ("image", "problem"):
        if not isinstance(entry.get(key), str):
            return None
    return entry


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry) + "\n"  # ASCII, because a name may contain what UTF-8 cannot encode


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    """Append an entry by one write, so that the lines of several ranks do not mix.

    On NFS the lines of two nodes may still tear each other; a resumed run then finds the image again. A line that cannot be
    written is logged and does not stop the run.
    """
    try:
        # O_APPEND makes the system write at the end of the file, whoever wrote last.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, _line(entry).encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("cannot write %s (%s): a resumed run will have to find %s again", path, error, entry["image"])
