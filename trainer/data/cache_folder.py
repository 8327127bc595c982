"""Where files are kept that are made from a set and can be made again: indices, uncompressed shards, downloads."""

import contextlib
import hashlib
import os
from pathlib import Path

from trainer.errors import InputError
from trainer.files import write_text

CACHE_FOLDER = ".wmse_index"


def user_cache() -> Path:
    """Return this user's folder for files that can be made again: $XDG_CACHE_HOME/wmse or ~/.cache/wmse."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wmse"


def find_cache(root: Path) -> Path:
    """Return the folder for what is built from ROOT: ROOT/.wmse_index or, if that can't be written, one in `user_cache`.

    It is made if missing and kept out of git. Raises InputError if neither can be written."""
    candidates = [user_cache() / hashlib.blake2b(os.fsencode(root.resolve()), digest_size=8).hexdigest()]
    inside = root / CACHE_FOLDER
    # a set marked read-only is left alone, even by root; a link in somebody's set could lead anywhere
    if root.stat().st_mode & 0o222 and not inside.is_symlink():
        candidates.insert(0, inside)
    for folder in candidates:
        with contextlib.suppress(OSError):  # not writable: try the next one
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / ".gitignore", "*\n")  # replaces the file: a link of that name is not followed
            return folder
    raise InputError(
        f"can't write to {folder}, where the index of {root} must be kept: make that folder or {root} writable, or set "
        "XDG_CACHE_HOME to a folder that is"
    )
