"""Follow a run from another process: measure each checkpoint as it appears, until the run is over."""

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
from trainer.evaluate.evaluator import Evaluator, load_encoder_content
from trainer.evaluate.report import print_table
from trainer.evaluate.results import Source
from trainer.run.checkpoint_files import list_checkpoints
from trainer.run.folder import lock_run_folder, start_logging

_SILENT_SECONDS = 1800.0  # without a heartbeat, and without a job that could be the reason: the run is over
_JOB_SECONDS = 120.0  # without a heartbeat, when SLURM says that the job is over: the run is, too
_TRIES = 3  # a network file system may show a new file incomplete for some seconds
_log = logging.getLogger(__name__)


def follow_run(run_dir: Path, settings: Sequence[str], measures: Sequence[str], poll_seconds: float) -> None:
    """Measure every checkpoint that has no result yet, oldest first, until the run is over and none is left.

    settings, measures: as for `run_evaluation`. The run need not have started yet. Can be ended and started again at any
    time: what is measured is on the disk. Raises InputError where the settings do not fit the run."""
    ranks = find_ranks()
    start_logging(None, ranks.rank)
    if ranks.world_size > 1:
        raise InputError(f"--follow runs on one rank, not on {ranks.world_size}: start one task, with one GPU")
    watch = RunWatch(run_dir)
    evaluator = _wait_for_run(run_dir, settings, poll_seconds, watch)
    if evaluator is None:
        return
    evaluator.results.check(must_keep=True)  # what has a result is not measured again
    # two evaluators would delete each other's temporary files
    with lock_run_folder(run_dir / "eval"):
        follower = _Follower(run_dir, evaluator, measures)
        while True:
            why_over = watch.why_over()  # first: what a run saved before it said so is in the list below
            follower.measure_all()
            if why_over and not follower.due():
                break
            time.sleep(poll_seconds)
    _log.info("%s: nothing is left to measure%s", why_over, follower.failures())


def _wait_for_run(run_dir: Path, settings: Sequence[str], poll_seconds: float, watch: RunWatch) -> Evaluator | None:
    """Return the evaluator once the run has written its settings; None if the run ends without them."""
    said = False
    while not (run_dir / "config.yaml").exists():
        why_over = watch.why_over()
        if why_over:
            _log.warning("%s before it wrote %s: there is nothing to measure", why_over, run_dir / "config.yaml")
            return None
        if not said:
            _log.info("waiting for %s", run_dir / "config.yaml")
        said = True
        time.sleep(poll_seconds)
    evaluator = Evaluator(run_dir, settings, find_ranks())
    _log.info("following %s, checking every %g s", run_dir, poll_seconds)
    return evaluator


class _Follower:
    """Measures what has no result yet."""

    def __init__(self, run_dir: Path, evaluator: Evaluator, measures: Sequence[str]) -> None:
        self._checkpoints = run_dir / "checkpoints"
        self._evaluator = evaluator
        self._measures = measures
        self._tries: Counter[tuple[Path, float]] = Counter()  # by version: a resumed run may write a step again

    def due(self) -> list[tuple[int, Path, list[str]]]:
        """(step, file, what is missing) of each checkpoint to measure, oldest first."""
        found = []
        for step, path in list_checkpoints(self._checkpoints):
            missing = [measure for measure in self._measures if not self._has_result(measure, step)]
            if missing and self._tries[path, _written(path)] < _TRIES:
                found.append((step, path, missing))
        return found

    def _has_result(self, measure: str, step: int) -> bool:
        path = self._evaluator.results.path(measure, Source(str(step)))
        return "top1" in read_json(path, [])

    def measure_all(self) -> None:
        """Measure what is due now; log a checkpoint that can't be read and skip it this time."""
        for step, path, missing in self.due():
            try:
                content = load_encoder_content(path)
            except InputError as error:
                self._tries[path, _written(path)] += 1
                _log.warning("step %d is skipped: %s", step, error)
                continue
            self._measure(step, missing, content, path)

    def _measure(self, step: int, missing: list[str], content: dict[str, Any], path: Path) -> None:
        encode = self._evaluator.trained_encoder(content, path)
        source = Source(str(step), path, content["sha256"])
        results = {}
        for measure, result in self._evaluator.measure(encode, source, missing):
            results[measure] = result
            try:
                self._evaluator.results.write(source, {measure: result})
            except OSError as error:
                self._tries[path, _written(path)] += 1
                _log.error("step %d: the result could not be written: %s; it will be measured again", step, error)
        print_table(source.name, results)

    def failures(self) -> str:
        """Name the checkpoints that could never be read, for the last log line."""
        lost = [path for (path, written), tries in self._tries.items() if tries >= _TRIES and written == _written(path)]
        names = sorted(path.name for path in lost if path.exists())
        return f"; could not be read: {', '.join(names)}" if names else ""


def _written(path: Path) -> float:
    """Return when a file was last written; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class RunWatch:
    """Tells whether a run is over, also one that was killed and could not say so."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._began = time.time()
        self._job_seen = 0.0  # when SLURM last said that the job waits or runs

    def why_over(self) -> str | None:
        """Why nothing more is to be expected of the run, in words; None while it waits or runs, or was never started."""
        run = read_run(self._run_dir)
        if run.status is None:
            return None
        if run.is_over(find_job(run.job_id) if run.status == "failed" else None):
            return f"the run ended ({run.status})"
        if run.status in FINAL:
            return None
        beats = run.status in ("starting", "running")  # in a queue it has no heartbeat to show
        beat = number(run.state, "heartbeat") if beats else None
        last = max(self._began if beat is None else beat, self._job_seen)
        silent = time.time() - last
        if silent <= _JOB_SECONDS:
            return None
        job = find_job(run.job_id)
        if job and job.is_active:
            self._job_seen = time.time()
            return None
        # without word from SLURM the disk may hang, or the run may be moving to another job
        if job is None and silent <= _SILENT_SECONDS:
            return None
        return f"the run said that it is {run.status}, but gave no sign of life for {(time.time() - last) / 60:.0f} min"
