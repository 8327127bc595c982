"""Options of `wmse sweep`, and the steps from the definition of a sweep to its table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cluster.site import Site, load_site, split_site_words
from trainer.errors import DONE, FAILED, PREEMPTED, InputError

if TYPE_CHECKING:
    from trainer.cluster.launch_checks import Request
    from trainer.sweep.definition import SweepRun
    from trainer.sweep.plan import Plan


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command. The file of the sweep comes before them; site options and settings are split off."""
    # argparse would take the value of a setting for the file, so `run_sweep` reads it.
    parser.usage = "wmse sweep [FILE] --out DIR [options] [--section.key value ...]"
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of all runs and of the table",
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="without a sweep file: a config or recipe that becomes a row; give it once for each row",
    )
    parser.add_argument(
        "--seeds", default="", metavar="S1,S2", help="seeds of each row (default: those of the file, or 0)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time on this machine (default 1)",
    )
    parser.add_argument("--retry_failed", action="store_true", help="start runs again that have failed or diverged")
    parser.add_argument(
        "--table", action="store_true", help="only print and write the table of what is measured so far"
    )
    parser.add_argument("--slurm", action="store_true", help="submit the runs as a SLURM array, one task for each")
    parser.add_argument(
        "--site", type=Path, metavar="FILE", help="with --slurm: options of the cluster; see slurm/cluster.yaml"
    )
    parser.add_argument(
        "--data_on_nodes", action="store_true", help="with --slurm: data.root exists on the compute nodes only"
    )
    # The sweep starts the process of a run with these.
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--untrained", action="store_true", help=argparse.SUPPRESS)


def run_sweep(file: Path | None, own: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run a sweep, or one run of it. Returns the exit code.

    file: the definition. own: the parsed options. rest: the other words, which are site options or settings."""
    # The sweep has started this process, or SLURM this task, for one run.
    if own.task:
        from trainer.sweep.task import run_task

        return run_task(own.config[0], rest, untrained=own.untrained)
    site_words, settings = split_site_words(rest)
    _check_options(file, own, site_words)
    # Import these late, so that a mistake in the options is reported at once.
    from trainer.cluster.launch_checks import Request
    from trainer.run.folder import lock_run_folder
    from trainer.sweep.definition import read_sweep
    from trainer.sweep.local import run_here
    from trainer.sweep.plan import Plan, active_jobs, check_runs
    from trainer.sweep.progress import why_unfinished
    from trainer.sweep.table import write_table

    runs = read_sweep(file, own.config or [], own.seeds, settings, own.out)
    if own.table:
        check_runs(runs, None)
        write_table(runs, own.out)
        return DONE
    site = load_site(own.site, site_words) if own.slurm else Site()
    if site.gpus_per_node > 1:
        raise InputError(
            f"gpus_per_node is {site.gpus_per_node}, but each run of a sweep uses one GPU: give --gpus_per_node 1, and "
            "--exclusive false and --memory for one run where the site asks for whole nodes"
        )
    # The evaluation needs the test split, so that is checked as well.
    request = Request(
        config=[],
        settings=[],
        array="",
        nodes="1",
        ranks_per_node=1,
        site=site,
        with_evaluator=True,
        data_on_nodes=own.data_on_nodes,
    )
    check_runs(runs, request)
    own.out.mkdir(parents=True, exist_ok=True)
    # Two sweeps in one folder would start the same runs.
    with lock_run_folder(own.out):
        jobs = active_jobs(runs)
        for run in runs:
            if run.config.run_dir in jobs:
                print(f"{run.name}: waits or runs as SLURM job {jobs[run.config.run_dir]}")
        free = [run for run in runs if run.config.run_dir not in jobs]
        plan = Plan(runs, jobs, retry_failed=own.retry_failed)
        if own.slurm:
            return _submit(free, plan, request, own.out)
        is_stopped = run_here(free, plan, own.jobs)
        write_table(runs, own.out)
    # A sweep that was stopped asks to be started again, as a preempted run does.
    if is_stopped:
        print("the sweep was stopped: give the same command again to continue")
        return PREEMPTED
    return FAILED if any(why_unfinished(run.config) for run in runs) else DONE


def _check_options(file: Path | None, own: argparse.Namespace, site_words: Sequence[str]) -> None:
    """Raise InputError for options that are missing or that would have no effect."""
    if own.out is None:
        raise InputError("--out is missing: give --out DIR, the folder for the runs and the table")
    if file is None and not own.config:
        raise InputError("no sweep is given: name a sweep file before the options, or give --config once for each row")
    if own.jobs < 1:
        raise InputError(f"--jobs is {own.jobs}: give at least 1")
    if own.slurm and (own.table or own.jobs > 1):
        raise InputError(
            "--slurm excludes --table and --jobs: SLURM decides how many runs it starts at a time, and the table is made when "
            "they have ended"
        )
    # Options of the cluster would have no effect on this machine.
    for_slurm = [
        *site_words[:1],
        *(["--site"] if own.site else []),
        *(["--data_on_nodes"] if own.data_on_nodes else []),
    ]
    if for_slurm and not own.slurm:
        raise InputError(f"{for_slurm[0]} only applies to --slurm: add --slurm, or remove it")


def _submit(runs: Sequence[SweepRun], plan: Plan, request: Request, out: Path) -> int:
    """Submit what is left to do as one array."""
    from trainer.cluster.launch import submit_runs
    from trainer.cluster.launch_checks import absolute

    # A run without a command has nothing left to do.
    commands = [(run, plan.command(run)) for run in runs]
    due = [(absolute(run.config), command) for run, command in commands if command is not None]
    if not due:
        print(
            "nothing to submit: every run is finished, has failed (--retry_failed starts it again), or waits or runs in SLURM"
        )
        return DONE
    folder = out.absolute()
    # Each task evaluates its own run, so the array needs no evaluators.
    submit_runs(
        [config for config, _ in due],
        (1, 1),
        replace(request, with_evaluator=False),
        folder,
        [command for _, command in due],
    )
    print(
        f"output of the jobs: {folder / 'slurm'}; `wmse status {out}` shows their progress. For the table, give this command "
        "with --table in place of --slurm and its options. To submit lost runs again, repeat this command"
    )
    return DONE
