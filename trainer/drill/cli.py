"""Options of `wmse drill`, and the run through its scenarios."""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import DONE, FAILED, InputError, TrainingFailedError

if TYPE_CHECKING:
    from trainer.drill.table import Row

_NAMES = ("kill", "suspend", "preempt", "disk", "checkpoint", "cut", "remove")
_log = logging.getLogger(__name__)


def add_drill_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="folder on the file system to test, such as that of your runs (default ./runs); what the drill writes there "
        "is removed at the end, unless a result is wrong",
    )
    parser.add_argument(
        "--only", nargs="+", choices=_NAMES, default=_NAMES, metavar="FAULT", help=f"faults: {', '.join(_NAMES)}"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the random steps at which faults happen (default 0)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="also write the results to this JSON file",
    )


def run_drill(own: argparse.Namespace) -> int:
    """Inject the faults and print the table. Returns 0 if every run ended as it should, else 1."""
    # These imports take seconds, which `--help` need not wait for.
    import torch

    from trainer.drill.table import table
    from trainer.files import write_text
    from trainer.run.folder import start_logging
    from trainer.run.machine import provenance

    start_logging(None, 0)
    if own.out and own.out.exists():
        raise InputError(f"{own.out} exists: give --out a new file")
    own.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="drill_", dir=own.folder)).resolve()
    _log.info("the toy runs are in %s, which is removed if all of them end as they should", folder)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="drill_") as outputs:
            rows = _drill(folder, Path(outputs), own.only, own.seed)
    except TrainingFailedError as error:
        _log.error("%s", error)
        return FAILED
    # The table is printed before the file is written, in case that fails.
    results = [asdict(row) for row in rows]
    print(table(results))
    if own.out:
        facts = {
            "seed": own.seed,
            "seconds": round(time.monotonic() - began),
            "file_system": str(own.folder.resolve()),
        }
        write_text(own.out, json.dumps(facts | {"rows": results} | provenance(torch.device("cpu")), indent=1) + "\n")
    if any(row.wrong for row in rows):
        _log.error("not every run ended as it should: its files are in %s", folder)
        return FAILED
    # The files of a wrong result are evidence, others are not.
    shutil.rmtree(folder)
    return DONE


def _drill(folder: Path, outputs: Path, names: Sequence[str], seed: int) -> list[Row]:
    """Inject the faults one after the other. Raises TrainingFailedError if the toy run fails without any."""
    from trainer.drill.scenarios import SCENARIOS
    from trainer.drill.toy import Toy

    # Every scenario is compared with a run that nothing disturbs.
    toy = Toy(folder, outputs)
    whole = toy.new_run()
    if problems := toy.finish(whole):
        raise TrainingFailedError(f"the toy run fails without any fault: {problems[0]}")
    _log.info("the toy run without faults is done")
    rng = random.Random(seed)
    rows = []
    for name in names:
        scenario, template = SCENARIOS[name]
        # The lists must not be those of the template, which another drill would share.
        row = replace(template, tries=1, updates_lost=[], wrong=[])
        try:
            scenario(toy, whole, row, rng)
        except TrainingFailedError as error:
            row.wrong.append(str(error))
        _log.info("%s: %s", row.fault, "; ".join(row.wrong) or "as it should")
        rows.append(row)
    return rows
