"""Folders for files that are derived from a data set and can be rebuilt: indices, uncompressed shards, downloads."""

import contextlib
import hashlib
import os
from pathlib import Path

from trainer.errors import InputError
from trainer.files import write_text

CACHE_FOLDER = ".wmse_index"


def user_cache() -> Path:
    """Return this user's folder for files that can be rebuilt: $XDG_CACHE_HOME/wmse or ~/.cache/wmse."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "wmse"


def find_cache(root: Path) -> Path:
    """Return the folder for files derived from ROOT: ROOT/.wmse_index, or a folder in `user_cache` if ROOT is read-only.

    The folder is created if it is missing, and a .gitignore keeps it out of git. Raises InputError if neither folder can be
    written.
    """
    # Each data set gets a folder of its own in the user's cache, named by a hash of its path.
    path_hash = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=8).hexdigest()
    candidates = [user_cache() / path_hash]
    inside = root / CACHE_FOLDER
    # A data set marked read-only stays untouched, even by root. A symbolic link in somebody else's set could lead anywhere.
    is_writable = root.stat().st_mode & 0o222
    if is_writable and not inside.is_symlink():
        candidates.insert(0, inside)
    for folder in candidates:
        # If this folder cannot be written, try the next one.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / ".gitignore", "*\n")  # replaces the file, so a link of that name is not followed
            return folder
    raise InputError(
        f"cannot write to {folder}, where the index of {root} must be kept: make that folder or {root} writable, or set "
        "XDG_CACHE_HOME to a writable folder"
    )
