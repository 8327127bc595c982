"""Decide which runs of a sweep to start, and by which command. Imports no torch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from trainer.cluster.jobs import find_jobs
from trainer.cluster.launch_checks import Request, describe_run, refuse_other_settings
from trainer.cluster.runs import read_run
from trainer.errors import InputError, problem_list
from trainer.sweep.definition import SweepRun
from trainer.sweep.progress import encoder_key, protocols_of, untrained_results, why_unfinished


def check_runs(runs: Sequence[SweepRun], request: Request | None) -> None:
    """Raise InputError that lists all runs that cannot train, and print the warnings of the others.

    request: None: only compare the settings with those of the run that the folder holds."""
    problems = []
    warnings: dict[str, None] = {}
    for run in runs:
        try:
            refuse_other_settings(run.config, run.run_dir)
            lines = describe_run(run.config, (1, 1), request) if request else []
        except InputError as error:
            problems.append(f"{run.name}: {error}")
            continue
        # The seeds of a row have the same warnings.
        warnings |= dict.fromkeys(f"row {run.row}: {line}" for line in lines if line.startswith("warning: "))
    if problems:
        raise problem_list(f"{len(problems)} run(s) do not fit their settings, their data or their folder", problems)
    for line in warnings:
        print(line)


class Plan:
    """Chooses the runs that have something left to do, and the run that measures each untrained encoder."""

    def __init__(self, runs: Sequence[SweepRun], active: Container[str] = (), *, retry_failed: bool = False) -> None:
        """active: folders of the runs that wait or run in SLURM. retry_failed: start failed runs again."""
        self._runs = runs
        self._retry_failed = retry_failed
        # The folder of the run that measures an untrained encoder, by the key of the encoder.
        self._claims: dict[str, str] = {}
        # A job of an earlier start may be about to measure one.
        for run in runs:
            if run.config.run_dir in active and "--untrained" in (read_run(run.run_dir).launch.get("command") or []):
                self._claims[encoder_key(run.config)] = run.config.run_dir

    def command(self, run: SweepRun) -> list[str] | None:
        """Return the words of the `wmse` command for a run, without its settings; None if it has nothing to do."""
        # The same settings would fail again, unless the cause was outside of the run.
        if read_run(run.run_dir).status == "failed" and not self._retry_failed:
            return None
        # A run that is finished may still be the one to measure its untrained encoder.
        untrained = self._claim(run)
        if not (why_unfinished(run.config) or untrained):
            return None
        return ["sweep", "--task", *(["--untrained"] if untrained else [])]

    def _claim(self, run: SweepRun) -> bool:
        """Return whether this run is the one to measure its untrained encoder."""
        key = encoder_key(run.config)
        if key in self._claims or len(untrained_results(run, self._runs)) == len(protocols_of(run.config)):
            return False
        self._claims[key] = run.config.run_dir
        return True

    def ended(self, run: SweepRun) -> None:
        """Let another run measure the untrained encoder, in case this one has not done it."""
        key = encoder_key(run.config)
        if self._claims.get(key) == run.config.run_dir:
            del self._claims[key]


def active_jobs(runs: Iterable[SweepRun]) -> dict[str, str]:
    """Return the SLURM job of each run that waits or runs there, by the run's folder."""
    ids = {}
    # Ask SLURM once for all jobs that the folders name.
    for run in runs:
        job_id = read_run(run.run_dir).job_id
        if job_id:
            ids[run.config.run_dir] = job_id
    jobs = find_jobs(ids.values())
    return {folder: job_id for folder, job_id in ids.items() if job_id in jobs and jobs[job_id].is_active}
