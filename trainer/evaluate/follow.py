"""Follow a run from another process, and measure each checkpoint as it appears, until the run is over."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.cluster.jobs import find_job
from trainer.cluster.runs import FINAL, number, read_json, read_run
from trainer.distributed.ranks import find_ranks
from trainer.errors import InputError
from trainer.evaluate.encoders import RunEvaluator
from trainer.evaluate.report import print_table
from trainer.evaluate.results import Source
from trainer.run.checkpoint import load_checkpoint
from trainer.run.checkpoint_files import list_checkpoints
from trainer.run.folder import lock_run_folder, start_logging

# A run without a heartbeat for this long counts as over: if SLURM does not know its job, and if SLURM says that it ended.
_SILENT_SECONDS = 1800.0
_JOB_SECONDS = 120.0
_TRIES = 3  # a network file system may show a new checkpoint incomplete for some seconds
_log = logging.getLogger(__name__)


def follow_run(run_dir: Path, settings: Sequence[str], names: Sequence[str] | None, poll_seconds: float) -> None:
    """Measure every checkpoint that has no result yet, oldest first, until the run is over and none is left.

    The run may start later. This function may be ended and started again at any time, because results are on the disk.

    settings, names: as for `run_evaluation`. Raises InputError if the settings do not fit the run."""
    ranks = find_ranks()
    start_logging(None, ranks.rank)
    if ranks.world_size > 1:
        raise InputError(
            f"--follow runs on one rank, but was started on {ranks.world_size}: start one task, with one GPU"
        )
    watch = RunWatch(run_dir)
    evaluator = _wait_for_run(run_dir, settings, poll_seconds, watch)
    if evaluator is None:
        return
    # Results must be kept, because only a result on the disk prevents a second measurement.
    evaluator.results.check(must_keep=True)
    # Two evaluators would delete each other's temporary files.
    with lock_run_folder(run_dir / "eval"):
        protocols = evaluator.protocols(names or evaluator.config.evaluate.protocols, "last")
        follower = _Follower(run_dir, evaluator, protocols)
        while True:
            # Ask this first: the list of checkpoints then includes all that the run saved before it ended.
            why_over = watch.why_over()
            follower.measure_all()
            if why_over and not follower.due():
                break
            time.sleep(poll_seconds)
    _log.info("%s: every checkpoint is measured%s", why_over, follower.failures())


def _wait_for_run(run_dir: Path, settings: Sequence[str], poll_seconds: float, watch: RunWatch) -> RunEvaluator | None:
    """Return the evaluator once the run has written its settings; None if the run ends without them."""
    config_path = run_dir / "config.yaml"
    is_logged = False
    while not config_path.exists():
        why_over = watch.why_over()
        if why_over:
            _log.warning("%s before it wrote %s: no checkpoint can be measured", why_over, config_path)
            return None
        if not is_logged:
            _log.info("waiting for %s", config_path)
            is_logged = True
        time.sleep(poll_seconds)
    evaluator = RunEvaluator(run_dir, settings, find_ranks())
    _log.info("following %s, checking every %g s", run_dir, poll_seconds)
    return evaluator


class _Follower:
    """Measures the checkpoints of a run that have no result yet."""

    def __init__(self, run_dir: Path, evaluator: RunEvaluator, protocols: Sequence[str]) -> None:
        self._checkpoints = run_dir / "checkpoints"
        self._evaluator = evaluator
        self._protocols = protocols
        # Failed tries by file and time of writing: a resumed run may write the checkpoint of a step again.
        self._tries: Counter[tuple[Path, float]] = Counter()

    def due(self) -> list[tuple[int, Path, list[str]]]:
        """List (step, file, missing protocols) of each checkpoint to measure, oldest first."""
        found = []
        for step, path in list_checkpoints(self._checkpoints):
            missing = [name for name in self._protocols if not self._has_result(name, step)]
            if missing and self._tries[path, _written(path)] < _TRIES:
                found.append((step, path, missing))
        return found

    def _has_result(self, protocol: str, step: int) -> bool:
        path = self._evaluator.results.path(protocol, Source(str(step)))
        return "figures" in read_json(path, [])

    def measure_all(self) -> None:
        """Measure all checkpoints that are due now. Log and skip a checkpoint that cannot be read."""
        for step, path, missing in self.due():
            try:
                content = load_checkpoint(path)
            except InputError as error:
                self._tries[path, _written(path)] += 1
                _log.warning("step %d is skipped: %s", step, error)
                continue
            self._measure(step, missing, content, path)

    def _measure(self, step: int, missing: list[str], content: dict[str, Any], path: Path) -> None:
        """Run the missing protocols on one checkpoint, and write each result at once."""
        encode = self._evaluator.trained_encoder(content, path)
        source = Source(str(step), path, content["sha256"], content.get("cost"))
        # A failed write is counted, and the next look finds the checkpoint without a result.
        results = {}
        for protocol, result in self._evaluator.measure(encode, source, missing):
            results[protocol] = result
            try:
                self._evaluator.results.write(source, protocol, result)
            except OSError as error:
                self._tries[path, _written(path)] += 1
                _log.error(
                    "cannot write the result of step %d: %s; the evaluator will measure this step again", step, error
                )
        print_table(source.name, results)

    def failures(self) -> str:
        """Name the checkpoints that could not be read or measured, for the last log line."""
        names = []
        for (path, written), tries in self._tries.items():
            is_current = path.exists() and written == _written(path)
            if is_current and tries >= _TRIES:
                names.append(path.name)
        return f", except {', '.join(sorted(names))}, which failed {_TRIES} times" if names else ""


def _written(path: Path) -> float:
    """Return when a file was last written; 0 if it is gone."""
    # The run deletes old checkpoints while they are looked at.
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class RunWatch:
    """Tells whether a run is over, even if it was killed and could not write this to state.json."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._began = time.time()
        self._job_seen = 0.0  # time when SLURM last reported the job as waiting or running

    def why_over(self) -> str | None:
        """Say why the run will write no more checkpoints; None while it waits or runs, or if it was never started."""
        run = read_run(self._run_dir)
        if run.status is None:
            return None
        job = find_job(run.job_id) if run.status == "failed" else None
        if run.is_over(job):
            return f"the run ended ({run.status})"
        if run.status in FINAL:
            return None

        # A run in a queue has no heartbeat. A missing one counts from the start of this evaluator.
        has_heartbeat = run.status in ("starting", "running")
        heartbeat = number(run.state, "heartbeat") if has_heartbeat else None
        last_sign = self._began if heartbeat is None else heartbeat
        silent = time.time() - max(last_sign, self._job_seen)
        if silent <= _JOB_SECONDS:
            return None
        job = find_job(run.job_id)
        if job and job.is_active:
            self._job_seen = time.time()
            return None
        # If SLURM does not answer, the disk may hang, or the run may be moving to another job.
        if job is None and silent <= _SILENT_SECONDS:
            return None
        return (
            f"state.json says that the run is {run.status}, but it has written no heartbeat for {silent / 60:.0f} min"
        )
