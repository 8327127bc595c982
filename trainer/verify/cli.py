"""Options of `wmse verify`, and the steps from the checks to the table and the certificate."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import DONE, FAILED, InputError
from trainer.files import describe_os_error, write_text

if TYPE_CHECKING:
    from trainer.verify.check import Check, Place

# The groups in the order of the table. `_groups` has their functions, whose modules load torch.
GROUPS = ("loss", "ranks", "views", "kernels", "optimizer", "evaluation", "resume")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="GROUP",
        help=f"make the checks of these groups only: {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the certificate to this file as well; with --only to this file alone",
    )
    # The command starts two local ranks with this: they write the checks that they make together to the file.
    parser.add_argument("--together", type=Path, help=argparse.SUPPRESS)


def run_verify(own: argparse.Namespace) -> int:
    """Make the checks, print the table, and write the certificate. Returns the exit code: FAILED if a check failed."""
    unknown = [name for name in own.only or () if name not in GROUPS]
    if unknown:
        raise InputError(f"there is no group {unknown[0]!r}: choose from {', '.join(GROUPS)}")
    # Before checks that take a minute.
    if own.out:
        own.out.parent.mkdir(parents=True, exist_ok=True)
        if own.out.is_dir():
            raise InputError(f"{own.out} is a folder: give --out the name of a file")
    # In the order of the table, whatever the order of the words.
    chosen = [name for name in GROUPS if own.only is None or name in own.only]
    # Operations on small tensors gain nothing from more threads, and other processes work beside this one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from trainer.config.schema import Config
    from trainer.distributed.device import choose_device
    from trainer.distributed.ranks import find_ranks
    from trainer.verify.check import Place

    # Under torchrun or srun, all ranks of the job make the checks together.
    ranks = find_ranks()
    device = torch.device("cpu") if own.together else choose_device(Config(), ranks)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wmse_verify_") as folder:
        place = Place(device, ranks, Path(folder))
        if own.together:
            checks = _of_several_ranks(chosen, place)
            # All ranks have the same results.
            if ranks.is_first:
                write_text(own.together, json.dumps([check.plain() for check in checks]))
            return DONE
        checks = _checks(chosen, place)
    if not ranks.is_first:
        return DONE
    # The checks of several ranks come last, but belong to their groups.
    checks.sort(key=lambda check: GROUPS.index(check.group))
    from trainer.verify.table import print_checks

    print_checks(checks)
    content = _certificate(checks, place, round(time.monotonic() - began, 1))
    for line in _write(content, own.out, is_complete=own.only is None):
        print(line)
    print(f"{content['passed']} of {len(checks)} checks passed, {content['skipped']} skipped")
    return FAILED if content["failed"] else DONE


def _groups() -> dict[str, tuple[Callable[[Place], Any] | None, Callable[[Place], Any] | None]]:
    """Return for each group the checks that one process makes, and those that several ranks make together."""
    from trainer.verify import evaluation, kernels, loss, optimizer, ranks, resume, views

    return {
        "loss": (loss.loss_items, None),
        "ranks": (None, ranks.ranks_items),
        "views": (views.views_items, None),
        "kernels": (kernels.kernels_items, None),
        "optimizer": (optimizer.optimizer_items, None),
        "evaluation": (evaluation.evaluation_items, evaluation.evaluation_of_ranks),
        "resume": (resume.resume_items, None),
    }


def _checks(chosen: Sequence[str], place: Place) -> list[Check]:
    """Make all checks. Of several ranks, rank 0 makes those of a single process when the others have ended."""
    from trainer.distributed.ranks import Ranks
    from trainer.verify.check import run_items
    from trainer.verify.session import LocalRanks

    names = [name for name in chosen if name in ("ranks", "evaluation")]
    checks: list[Check] = []
    with ExitStack() as stack:
        local = None
        if place.ranks.world_size > 1:
            checks += _of_several_ranks(names, place)
            if not place.ranks.is_first:
                return checks
        elif names:
            # The two ranks work while this process makes the other checks.
            local = LocalRanks(names, place.folder)
            stack.callback(local.close)
        alone = replace(place, ranks=Ranks())
        groups = _groups()
        # One group after the other, so that the terminal shows which one takes long.
        for name in chosen:
            items_of, _ = groups[name]
            if items_of is not None:
                _say(f"checking {name} ...")
                checks += run_items(name, items_of(alone))
        if local is not None:
            _say("waiting for the two local ranks ...")
            checks += local.finish()
    return checks


def _of_several_ranks(names: Sequence[str], place: Place) -> list[Check]:
    """Make the checks that all ranks make together."""
    from trainer.verify.session import together

    groups = _groups()
    wanted = []
    for name in names:
        _, items_of = groups[name]
        if items_of is not None:
            wanted.append((name, items_of))
    # Without checks the ranks need not meet.
    return together(wanted, place) if wanted else []


def _say(text: str) -> None:
    """Show what is being done, on a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _certificate(checks: Sequence[Check], place: Place, seconds: float) -> dict[str, Any]:
    """Return the content of certificate.json."""
    import torch

    from trainer.config.schema import Config
    from trainer.distributed.device import PRECISION_NAMES, autocast_dtype
    from trainer.run.certificate import identity
    from trainer.verify.session import LOCAL_RANKS

    results = [check.result for check in checks]
    backends: Any = torch.backends
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "passed": results.count("passed"),
        "failed": results.count("failed"),
        "skipped": results.count("skipped"),
        **identity(place.device),
        "device_type": place.device.type,
        "ranks": place.ranks.world_size if place.ranks.world_size > 1 else LOCAL_RANKS,
        "ranks_are_local_processes": place.ranks.world_size == 1,
        "precision": {
            "training": PRECISION_NAMES[autocast_dtype(Config(), place.device)],
            "cuda_matmul": backends.cuda.matmul.fp32_precision,
            "cudnn_conv": backends.cudnn.conv.fp32_precision,
            "mkldnn_matmul": backends.mkldnn.matmul.fp32_precision,
        },
        "seconds": seconds,
        "checks": [check.plain() for check in checks],
    }


def _write(content: dict[str, Any], out: Path | None, *, is_complete: bool) -> list[str]:
    """Write the certificate, and return lines that say where. Only a complete one is kept for runs and evaluations."""
    from trainer.run.certificate import certificate_path, write_certificate

    lines = []
    if is_complete:
        # The name of the file is a digest of what the certificate holds for.
        path = certificate_path({name: content[name] for name in ("commit", "code", "device", "versions")})
        try:
            write_certificate(content, path)
            lines.append(f"certificate: {path}")
        except OSError as error:
            lines.append(f"the certificate is not kept for runs: {describe_os_error(error)}")
    # A file that the user named must be written, so its errors end the command.
    if out is not None:
        write_certificate(content, out)
        lines.append(f"certificate: {out}")
    elif not is_complete:
        lines.append("no certificate is written, because not all groups were checked; --out FILE writes one")
    return lines
