"""Injects faults into many runs and compares each with a run without faults. `make soak` runs it for a given time.

    python -m tests.soak [--minutes M] [--seed S] [--out FILE.json] [--docs FILE.md]

Each scenario is a row of the table: how often it was tried, how many updates were repeated, and whether the result was as
expected. On one rank it must be equal bit for bit, on a changing number of ranks up to rounding. The exit code is 1 if a
result was not as expected.
"""

from __future__ import annotations

import argparse
import errno
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tests.conftest import TINY, write_images
from tests.faults import Faults, start
from tests.integration.run_files import checkpoint, metrics
from trainer.drill.table import Row, lost_updates, table
from trainer.files import write_text
from trainer.run.machine import provenance

MARK = "<!-- soak -->"
STEPS = 9  # of a run with TINY
Arguments = list[str | Path]


class Soak:
    """The image folder, the unbroken runs, and a new folder for each try."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng, self.tries = folder, random.Random(seed), 0
        for split, count in (("train", 24), ("val", 8)):
            for number, name in enumerate(("cats", "dogs")):
                write_images(folder / "set" / split / name, count, seed=number + 10 * (split == "val"))
        (folder / "tiny.yaml").write_text(TINY)
        self.joint = ("--model.batch_norm_ranks", "all", "--optimizer.name", "lars")
        self._finish(self.arguments(folder / "joint", *self.joint))
        began = time.monotonic()
        self._finish(self.arguments(folder / "whole"))
        self.seconds = time.monotonic() - began  # duration of a run with its process

    def arguments(self, run_dir: Path, *more: str) -> Arguments:
        return ["pretrain", "--config", self.folder / "tiny.yaml", "--data.root", self.folder / "set", "--run_dir", run_dir,
                "--checkpoint.every_steps", "2", *more]  # fmt: skip

    def run_dir(self) -> Path:
        self.tries += 1
        return self.folder / f"run{self.tries}"

    def _finish(self, arguments: Arguments, ranks: int = 1) -> None:
        for process in start(arguments, self.folder, ranks=ranks):
            assert process.wait(120) == 0, process.output()

    def until_done(
        self, row: Row, arguments: Arguments, faults: Callable[[int], Faults | None], codes: set[int]
    ) -> None:
        """Start the command repeatedly, with the faults of `faults(number of the start)`, until that is None."""
        run_dir = Path(arguments[arguments.index("--run_dir") + 1])
        for number in range(100):
            injected = faults(number)
            (process,) = start(arguments, self.folder, injected)
            code = process.wait(120)
            if injected is None:
                if code:
                    row.wrong.append(f"exit code {code}: {process.output()[-300:]}")
                return
            row.strikes += 1
            row.updates_lost.append(lost_updates(run_dir))
            if code not in codes:
                row.wrong.append(f"exit code {code}, not {codes}: {process.output()[-300:]}")


def compare(row: Row, run_dir: Path, whole: Path, *, exact: bool) -> None:
    """Compare the metrics of two runs and, if exact, their weights."""
    ours, theirs = metrics(run_dir), metrics(whole)
    if exact:
        if ours != theirs:
            row.wrong.append(f"{run_dir.name}: other log lines")
        models = [checkpoint(folder, STEPS)["model"] for folder in (run_dir, whole)]
        if not all(torch.equal(models[0][name], value) for name, value in models[1].items()):
            row.wrong.append(f"{run_dir.name}: other weights")
    elif [line["step"] for line in ours] != [line["step"] for line in theirs] or any(
        abs(a["loss"] - b["loss"]) > 2e-3 * b["loss"] for a, b in zip(ours, theirs, strict=True)
    ):
        row.wrong.append(f"{run_dir.name}: other losses")


# --- scenarios ---


def random_kill(soak: Soak, row: Row) -> None:
    run_dir = soak.run_dir()
    arguments = soak.arguments(run_dir)
    while True:
        (process,) = start(arguments, soak.folder)
        seconds = soak.rng.uniform(0, soak.seconds) * (3 if row.strikes % 4 == 3 else 1)
        try:
            code = process.wait(seconds)
        except TimeoutError:  # `wait` has killed the process
            row.strikes += 1
            row.updates_lost.append(lost_updates(run_dir))
            continue
        if code:
            row.wrong.append(f"exit code {code}: {process.output()[-300:]}")
        break
    compare(row, run_dir, soak.folder / "whole", exact=True)


def kill_at_a_step(soak: Soak, row: Row) -> None:
    run_dir = soak.run_dir()
    steps = sorted(soak.rng.sample(range(STEPS), 2))
    strikes = [Faults(kill_at_step=step) for step in steps]
    soak.until_done(row, soak.arguments(run_dir), lambda n: strikes[n] if n < 2 else None, {-signal.SIGKILL})
    compare(row, run_dir, soak.folder / "whole", exact=True)


def kill_in_a_save(soak: Soak, row: Row) -> None:
    run_dir = soak.run_dir()
    strike = Faults(kill_in_save=(soak.rng.randrange(2), soak.rng.choice(["writing", "fsync", "rename", "renamed"])))
    soak.until_done(row, soak.arguments(run_dir), lambda n: strike if n == 0 else None, {-signal.SIGKILL})
    compare(row, run_dir, soak.folder / "whole", exact=True)


def preempted(soak: Soak, row: Row) -> None:
    run_dir = soak.run_dir()
    number = soak.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
    strike = Faults(signal_at_step=(soak.rng.randrange(STEPS - 3), number))
    soak.until_done(row, soak.arguments(run_dir), lambda n: strike if n == 0 else None, {75})
    compare(row, run_dir, soak.folder / "whole", exact=True)


def changing_ranks(soak: Soak, row: Row) -> None:
    """Run on one rank, on two, of which one is killed, and on one again."""
    run_dir, step = soak.run_dir(), soak.rng.randrange(3, 7)
    arguments = soak.arguments(run_dir, *soak.joint)
    soak._finish([*arguments, "--max_steps", "3"])
    codes = [p.wait(120) for p in start(arguments, soak.folder, Faults(on_rank=1, kill_at_step=step), ranks=2)]
    row.strikes += 1
    row.updates_lost.append(lost_updates(run_dir))
    if codes != [1, -signal.SIGKILL]:
        row.wrong.append(f"exit codes {codes}")
    soak._finish([*arguments, "--max_steps", "8"], ranks=2)
    soak._finish(arguments)
    compare(row, run_dir, soak.folder / "joint", exact=False)


def full_disk(soak: Soak, row: Row) -> None:
    run_dir, first = soak.run_dir(), soak.rng.randrange(3)
    strike = Faults(full_disk=(first, first + 2), disk_errno=soak.rng.choice([errno.ENOSPC, errno.EDQUOT]))
    (process,) = start(soak.arguments(run_dir), soak.folder, strike)
    code = process.wait(120)
    row.strikes += 2
    if code or process.output().count("was NOT saved") != 2:
        row.wrong.append(f"exit code {code}: {process.output()[-300:]}")
    compare(row, run_dir, soak.folder / "whole", exact=True)


def torn_checkpoint(soak: Soak, row: Row) -> None:
    """Truncate the newest checkpoint of a stopped run, or flip one of its bits."""
    run_dir = soak.run_dir()
    soak._finish([*soak.arguments(run_dir), "--max_steps", "6"])
    before, newest = sorted((run_dir / "checkpoints").glob("step_*.pt"))[-2:]
    data = bytearray(newest.read_bytes())
    if soak.rng.random() < 0.5:
        data = data[: soak.rng.randrange(len(data))]
    else:
        data[soak.rng.randrange(len(data) // 2)] ^= 1 << soak.rng.randrange(8)
    newest.write_bytes(data)
    row.strikes += 1
    row.updates_lost.append(int(newest.stem[-8:]) - int(before.stem[-8:]))
    soak._finish(soak.arguments(run_dir))
    compare(row, run_dir, soak.folder / "whole", exact=True)


def _whole_and_killed(soak: Soak, row: Row, faults: Faults, step: int) -> tuple[Path, Path]:
    """Make two runs with the same faults; the second one is also killed at `step` and started again."""
    whole, run_dir = soak.run_dir(), soak.run_dir()
    killed = replace(faults, kill_at_step=step)
    for where, injected, code in ((whole, faults, 0), (run_dir, killed, -signal.SIGKILL), (run_dir, faults, 0)):
        (process,) = start(soak.arguments(where), soak.folder, injected)
        if process.wait(120) != code:
            row.wrong.append(f"{where.name}: {process.output()[-300:]}")
        if code:
            row.updates_lost.append(lost_updates(where))
    row.strikes += 1
    return whole, run_dir


def failing_files(soak: Soak, row: Row) -> None:
    """The same images fail in a run and in one that is killed in between."""
    bad = tuple(soak.rng.sample(range(48), 3))
    how = soak.rng.choice(["vanished", "denied", "cut"])
    whole, run_dir = _whole_and_killed(soak, row, Faults(bad_reads=bad, bad_read=how), soak.rng.randrange(1, STEPS))
    named = sorted(json.loads(line)["id"] for line in (run_dir / "quarantine.jsonl").read_text().splitlines())
    if named != sorted(bad):
        row.wrong.append(f"{run_dir.name}: quarantine names {named}, not {sorted(bad)}")
    compare(row, run_dir, whole, exact=True)


def failing_numbers(soak: Soak, row: Row) -> None:
    """Two updates are skipped, in a run and in one that is killed between or after them."""
    first = soak.rng.randrange(1, 6)
    poison = Faults(poison=soak.rng.choice(["embeddings", "loss", "gradient"]), poison_steps=(first, first + 2))
    whole, run_dir = _whole_and_killed(soak, row, poison, soak.rng.randrange(first + 1, STEPS))
    failed = sum(json.loads(line)["skipped_steps"] for line in (whole / "metrics.jsonl").read_text().splitlines())
    if failed != 2:
        row.wrong.append(f"{whole.name}: {failed} failed steps counted, not 2")
    compare(row, run_dir, whole, exact=True)


def hanging_rank(soak: Soak, row: Row) -> None:
    """A rank is frozen, or its reads hang. All ranks that are not frozen end within the time-out of 12 s."""
    run_dir, frozen = soak.run_dir(), soak.rng.random() < 0.5
    hangs = {"bad_reads": tuple(range(48)), "bad_read": "hangs", "bad_reads_after": soak.rng.randrange(24, 50)}
    strike = Faults(on_rank=1, **({"freeze_at_step": soak.rng.randrange(STEPS)} if frozen else hangs))
    arguments, began = soak.arguments(run_dir, *soak.joint), time.monotonic()
    first, second = start([*arguments, "--timeout_minutes", "0.2"], soak.folder, strike, ranks=2)
    code = first.wait(120)
    if frozen:
        second.kill()
    row.strikes += 1
    row.updates_lost.append(lost_updates(run_dir))
    ended = code == 1 and (frozen or second.wait(30) == 1)
    if not ended or time.monotonic() - began > 45:
        row.wrong.append(f"{run_dir.name}: exit code {code} after {time.monotonic() - began:.0f} s")
    soak._finish(arguments, ranks=2)
    compare(row, run_dir, soak.folder / "joint", exact=False)


SCENARIOS: list[tuple[Callable[[Soak, Row], None], Row]] = [
    (random_kill, Row("killed at any moment", "SIGKILL after a random time, again and again", "bit for bit")),
    (kill_at_a_step, Row("killed in a step", "SIGKILL before two random steps", "bit for bit")),
    (
        kill_in_a_save,
        Row("killed in a save", "SIGKILL while writing, at fsync, at the rename, after it", "bit for bit"),
    ),
    (preempted, Row("preempted", "TERM, USR1, USR2 or INT at a random step", "exit code 75, bit for bit")),
    (
        changing_ranks,
        Row("a rank is lost; 1, 2, 1 ranks", "SIGKILL of one of two ranks", "exit code 1, equal to rounding"),
    ),
    (hanging_rank, Row("a rank hangs", "SIGSTOP, or reads that never return", "ends in time, equal to rounding")),
    (
        failing_numbers,
        Row("NaN", "in embeddings, loss or gradients of two steps; SIGKILL", "no update, counted, bit for bit"),
    ),
    (
        full_disk,
        Row("disk full, or over quota", "ENOSPC or EDQUOT in two saves in a row", "logged, continues, bit for bit"),
    ),
    (torn_checkpoint, Row("damaged checkpoint", "truncated, or one bit flipped", "skipped with its name, bit for bit")),
    (
        failing_files,
        Row("files vanish, are refused or cut", "3 of 48 images; SIGKILL", "named once, replaced alike, bit for bit"),
    ),
]


def main() -> int:
    """Try each scenario in turn until the time is over, at least once. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="how long (default 10); each scenario runs at least once"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    parser.add_argument("--docs", type=Path, help=f"put the table between the two lines {MARK} of this file")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wmse_soak_") as folder:
        soak = Soak(Path(folder), options.seed)
        while True:
            for scenario, row in SCENARIOS:
                row.tries += 1
                scenario(soak, row)
                print(
                    f"{time.monotonic() - began:6.0f} s  {row.fault}: try {row.tries}, {row.wrong or 'well'}",
                    flush=True,
                )
            if time.monotonic() - began > 60 * options.minutes:
                break
    rows = [asdict(row) for _, row in SCENARIOS]
    result: dict[str, Any] = {"seed": options.seed, "seconds": round(time.monotonic() - began), "rows": rows}
    print(table(result["rows"]))
    if options.out:
        write_text(options.out, json.dumps(result | provenance(torch.device("cpu")), indent=1) + "\n")
    if options.docs:
        before, _, rest = options.docs.read_text().partition(MARK)
        write_text(options.docs, f"{before}{MARK}\n{table(result['rows'])}\n{MARK}{rest.partition(MARK)[2]}")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
