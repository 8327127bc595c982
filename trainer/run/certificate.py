"""Certificates that `wmse verify` writes: the newest complete one of this code on this machine, and how results refer to it."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

import trainer
from trainer.data.cache_folder import user_cache
from trainer.files import write_text
from trainer.run.commit import git_commit
from trainer.run.machine import device_name, versions

NAME = "certificate.json"
_COUNTS = ("passed", "failed", "skipped")
_log = logging.getLogger(__name__)


def identity(device: torch.device) -> dict[str, Any]:
    """Return what a certificate holds for: commit, digest of the code, name of the device, versions of packages."""
    return {
        "commit": git_commit(),
        "code": _code_digest(),
        "device": device_name(device),
        "versions": versions(device),
    }


def _code_digest() -> str:
    """Return a digest of all source files. A commit alone does not tell about changes, and an installation has no commit."""
    root = Path(trainer.__file__).parents[1]
    digest = hashlib.sha256()
    for package in ("kernels", "trainer"):
        for file in sorted((root / package).rglob("*.py")):
            # The name belongs to the digest, so that a renamed file changes it.
            digest.update(f"{file.relative_to(root)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    return user_cache() / "certificates"


def certificate_path(of: dict[str, Any]) -> Path:
    """Return the file of the certificate for an `identity`. Machines that share a home folder have different files."""
    # Sorted keys give equal identities the same text.
    text = json.dumps(of, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return _folder() / f"{digest[:16]}.json"


def write_certificate(content: dict[str, Any], path: Path) -> None:
    """Write a certificate atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")


def find_certificate(device: torch.device) -> Path | None:
    """Return the certificate of this code on this device; None if there is none.

    Logs why, if there are only certificates for something else. Without any certificate this only looks for a folder."""
    # A folder that does not exist holds no files.
    others = list(_folder().glob("*.json"))
    if not others:
        return None
    wanted = identity(device)
    path = certificate_path(wanted)
    if path.exists():
        return path
    # The newest one says what has changed since.
    newest = max(others, key=lambda file: file.stat().st_mtime)
    before = _read(newest)
    changed = [name for name, value in wanted.items() if before.get(name) != value]
    _log.info(
        "the certificate of `wmse verify` is not attached, because it is of other %s; run `wmse verify` again to renew it",
        ", ".join(changed) or "content",
    )
    return None


def _read(path: Path) -> dict[str, Any]:
    """Read a certificate; empty if it is damaged."""
    # Reading a named pipe would wait for ever.
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def attach_certificate(run_dir: Path, device: torch.device) -> None:
    """Copy the current certificate to RUN_DIR/certificate.json. Without one, remove that of an earlier start.

    A failure only costs the certificate, so it is logged."""
    target = run_dir / NAME
    try:
        path = find_certificate(device)
        content = _read(path) if path else {}
        if not content:
            # It would belong to other code or another machine.
            target.unlink(missing_ok=True)
            return
        write_text(target, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        _log.warning("cannot attach the certificate of `wmse verify`: %s", error)


def summary(path: Path | None) -> dict[str, Any] | None:
    """Return date, counts and digest of a certificate, for the results of an evaluation; None if there is none."""
    if path is None:
        return None
    try:
        encoded = path.read_bytes()
    except OSError:
        return None
    content = _read(path)
    # A user may have edited the file.
    if not {"date", *_COUNTS} <= content.keys():
        return None
    return {
        "date": content["date"],
        **{name: content[name] for name in _COUNTS},
        "sha256": hashlib.sha256(encoded).hexdigest(),
    }
