"""Faults of a drill. Each function injects one kind into toy runs and notes in its row what did not go as it should."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.drill.table import Row, lost_updates
from trainer.drill.toy import SAVE_EVERY, STEPS, Toy, ToyRun, differences, skipped_images

_SUSPENDED_SECONDS = 5.0
_SMALL_FILES = 1 << 18  # bytes; a log line fits, a checkpoint does not
_ROOM = 1 << 30  # bytes; a file system with less free space is really filled
_PAUSE = 10  # step at which an image is damaged


def killed(toy: Toy, whole: Path, row: Row, rng: random.Random) -> None:
    """Kill a run twice without a warning, and let it continue."""
    run_dir = toy.new_run()
    # Once in each half of the run.
    for first, last in ((1, STEPS // 2), (STEPS // 2, STEPS - 10)):
        run = toy.start(run_dir)
        run.wait_for_step(rng.randrange(first, last))
        # SIGKILL leaves no time to save anything.
        run.send(signal.SIGKILL)
        run.wait()
        row.strikes += 1
        row.updates_lost.append(lost_updates(run_dir))
    row.wrong += toy.finish(run_dir) or differences(run_dir, whole)


def suspended(toy: Toy, whole: Path, row: Row, rng: random.Random) -> None:
    """Suspend a run for some seconds, as a scheduler or a laptop's lid does."""
    run_dir = toy.new_run()
    run = toy.start(run_dir)
    run.wait_for_step(rng.randrange(1, STEPS // 2))
    run.send(signal.SIGSTOP)
    time.sleep(_SUSPENDED_SECONDS)
    # The watchdog must not take the pause for a hang.
    run.send(signal.SIGCONT)
    row.strikes += 1
    row.wrong += _end(run) or differences(run_dir, whole)


def _end(run: ToyRun) -> list[str]:
    """Wait for the end of a run. Returns what went wrong."""
    code = run.wait()
    if code == 0:
        return []
    return [f"exit code {code}: {run.output()}"]


def preempted(toy: Toy, whole: Path, row: Row, rng: random.Random) -> None:
    """Send a run the signals of schedulers, which must end it with a checkpoint and exit code 75."""
    run_dir = toy.new_run()
    other = rng.choice([signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
    # Late enough in the run that the second signal finds a resumed run, and early enough that it has not ended.
    steps = {
        signal.SIGTERM: rng.randrange(1, STEPS // 2),
        other: rng.randrange(STEPS // 2, STEPS - 10),
    }
    for number, step in steps.items():
        run = toy.start(run_dir)
        run.wait_for_step(step)
        run.send(number)
        code = run.wait()
        row.strikes += 1
        row.updates_lost.append(lost_updates(run_dir))
        if code != 75:
            row.wrong.append(f"{number.name}: exit code {code}, not 75: {run.output()}")
    row.wrong += toy.finish(run_dir) or differences(run_dir, whole)


def disk_full(toy: Toy, whole: Path, row: Row, rng: random.Random) -> None:
    """Leave no room for checkpoints for a while."""
    run_dir = toy.new_run()
    run = toy.start(run_dir)
    run.wait_for_step(rng.randrange(1, STEPS // 2))
    row.injected, make_room = _fill(toy.folder, run)
    row.strikes += 1
    # The next checkpoint has no room; then there is room again.
    run.wait_for_output("was NOT saved")
    make_room()
    row.wrong += _end(run) or differences(run_dir, whole)


def _fill(folder: Path, run: ToyRun) -> tuple[str, Callable[[], object]]:
    """Make writing of checkpoints fail. Returns a description, and the function that ends this.

    A small file system is filled. On a large one, the process may not write large files, since filling it could harm others.
    """
    pid = run.process.pid
    free = shutil.disk_usage(folder).free
    if free > _ROOM:
        # The hard limit stays, so that the soft one can be raised again.
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        limit = resource.RLIMIT_FSIZE
        resource.prlimit(pid, limit, (_SMALL_FILES, most))
        return "a limit on the size of files", lambda: resource.prlimit(pid, limit, (most, most))
    filler = folder / "filler"
    block = bytes(1 << 20)
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        # A short write or an error says that the file system is full.
        while file.write(block) == len(block):
            pass
    return "the file system is filled", filler.unlink


def cut_image(toy: Toy, whole: Path, row: Row, rng: random.Random) -> None:
    """Cut an image file during a run, in two runs, one of which is also killed."""
    _damage(toy, row, rng, lambda path: path.write_bytes(path.read_bytes()[:60]))


def removed_image(toy: Toy, whole: Path, row: Row, rng: random.Random) -> None:
    """Remove an image file during a run, in two runs, one of which is also killed."""
    _damage(toy, row, rng, Path.unlink)


def _damage(toy: Toy, row: Row, rng: random.Random, harm: Callable[[Path], object]) -> None:
    images = toy.copy_images()
    files = [path for path in images.rglob("*") if path.is_file()]
    path = rng.choice(sorted(files))
    content = path.read_bytes()
    undisturbed = toy.new_run()
    run_dir = toy.new_run()
    for folder in (undisturbed, run_dir):
        # Both runs begin with the sound image, and find it damaged from the same step on.
        path.write_bytes(content)
        row.wrong += toy.finish(folder, images, max_steps=_PAUSE)
        harm(path)
        row.strikes += 1
        if folder == run_dir:
            run = toy.start(folder, images)
            run.wait_for_step(rng.randrange(_PAUSE + 5, STEPS - 10))
            run.send(signal.SIGKILL)
            run.wait()
            row.updates_lost.append(lost_updates(folder))
        row.wrong += toy.finish(folder, images)
        skipped = skipped_images(folder)
        if skipped != {path.name}:
            row.wrong.append(f"quarantine.jsonl names {skipped or 'nothing'}, not {path.name}")
    row.wrong += differences(run_dir, undisturbed)


def torn_checkpoint(toy: Toy, whole: Path, row: Row, rng: random.Random) -> None:
    """Cut the newest checkpoint of a run, as a node does that loses power."""
    run_dir = toy.new_run()
    row.wrong += toy.finish(run_dir, max_steps=6 * SAVE_EVERY)
    # Names hold the step with leading zeros, so the largest name is the newest.
    newest = max((run_dir / "checkpoints").glob("step_*.pt"))
    data = newest.read_bytes()
    newest.write_bytes(data[: rng.randrange(len(data))])
    row.strikes += 1
    row.updates_lost.append(SAVE_EVERY)
    row.wrong += toy.finish(run_dir)
    if f"skipped {newest.name}" not in (run_dir / "log.txt").read_text():
        row.wrong.append(f"the log does not name {newest.name}")
    row.wrong += differences(run_dir, whole)


Scenario = Callable[[Toy, Path, Row, random.Random], None]
SCENARIOS: dict[str, tuple[Scenario, Row]] = {
    "kill": (killed, Row("killed", "SIGKILL at two random steps", "bit for bit")),
    "suspend": (suspended, Row("suspended", f"SIGSTOP for {_SUSPENDED_SECONDS:.0f} s", "continues, bit for bit")),
    "preempt": (preempted, Row("preempted", "TERM, and USR1, USR2 or HUP", "exit code 75, bit for bit")),
    "disk": (disk_full, Row("no room for checkpoints", "", "logged, continues, bit for bit")),
    "checkpoint": (torn_checkpoint, Row("damaged checkpoint", "cut at a random byte", "skipped by name, bit for bit")),
    "cut": (cut_image, Row("an image is cut", "to 60 bytes during the run; SIGKILL", "named, replaced alike")),
    "remove": (removed_image, Row("an image is removed", "during the run; SIGKILL", "named, replaced alike")),
}
