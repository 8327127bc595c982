"""`wmse launch`: check runs, then start them on this machine or submit them to SLURM."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.cluster.jobs import find_job
from trainer.cluster.launch_checks import Request, check_run, fit_to_nodes, read_configs
from trainer.cluster.local import run_local
from trainer.cluster.nodes import parse_node_count
from trainer.cluster.runs import read_run, text
from trainer.cluster.site import evaluator_site
from trainer.cluster.slurm import batch_script, job_parameters, submit
from trainer.cluster.snapshot import new_code_folder, save_settings, take_snapshot
from trainer.config.schema import Config
from trainer.errors import DONE, InputError
from trainer.files import write_text
from trainer.run.commit import git_commit
from trainer.run.folder import open_run_folder
from trainer.run.state import mark_run


def launch(request: Request, cluster: str, *, dry_run: bool) -> int:
    """Check all runs of the request, then start or submit them. Returns the exit code, 0 if the jobs are submitted.

    Raises InputError, before anything is started, if one of the runs cannot be trained as requested.
    """
    nodes = parse_node_count(request.nodes)
    if request.ranks_per_node < 1:
        raise InputError(f"--ranks_per_node is {request.ranks_per_node}: give at least 1")
    if cluster == "local" and nodes != (1, 1):
        raise InputError(f"--nodes is {request.nodes}, but --cluster local runs on this machine only: remove --nodes")
    # Check every run before the first one starts.
    configs = [fit_to_nodes(config, nodes, request.ranks_per_node) for config in read_configs(request)]
    for config in configs:
        check_run(config, nodes, request)
    if cluster == "local":
        return _start_here(configs, request, dry_run=dry_run)
    if dry_run:
        _print_scripts(configs, nodes, request)
    else:
        folder = _common_folder(configs)
        submit_runs(configs, nodes, request, folder, [["pretrain"]] * len(configs))
        print(f"output of the jobs: {folder / 'slurm'}; `wmse status {folder}` shows their progress")
    return DONE


def _print_scripts(configs: list[Config], nodes: tuple[int, int], request: Request) -> None:
    """Print the batch scripts of the runs and of their evaluators."""
    folder = _common_folder(configs)
    parameters = _parameters(folder, nodes, request, folder / "code")
    print(batch_script(folder / "slurm", parameters, len(configs)))
    if not request.with_evaluator:
        return
    for config in configs:
        run_dir = Path(config.run_dir)
        parameters = _evaluator_parameters(run_dir, "JOB", request, folder / "code")
        print(batch_script(run_dir / "slurm", parameters, 1))


def _start_here(configs: list[Config], request: Request, *, dry_run: bool) -> int:
    """Run one config after the other on this machine.

    Returns the first exit code that is not 0, which ends the sequence."""
    for config in configs:
        if dry_run:
            print(f"would start {request.ranks_per_node} rank(s) for {config.run_dir}")
            continue
        open_run_folder(config.run_dir)
        # The settings are not in the run folder: a second launch into it, though refused later, would overwrite them.
        with tempfile.TemporaryDirectory(prefix="wmse_launch_") as folder:
            settings = save_settings(config, Path(folder))
            code = run_local(["pretrain", "--config", str(settings)], request.ranks_per_node)
        # The evaluator runs after the training, because the ranks use all GPUs.
        if code == DONE and request.with_evaluator:
            code = run_local(["evaluate", "--follow", config.run_dir], ranks=1)
        if code:
            return code
    return DONE


def _common_folder(configs: list[Config]) -> Path:
    """Return the folder for code, submitit's files and the jobs' output: the folder of the run or of the array."""
    first = Path(configs[0].run_dir)
    return first if len(configs) == 1 else first.parent


def _parameters(folder: Path, nodes: tuple[int, int], request: Request, code: Path) -> dict[str, Any]:
    return job_parameters(
        request.site,
        name=folder.name,
        nodes=nodes,
        tasks_per_node=request.ranks_per_node,
        code=code,
    )


def submit_runs(
    configs: Sequence[Config],
    nodes: tuple[int, int],
    request: Request,
    folder: Path,
    commands: Sequence[Sequence[str]],
) -> None:
    """Snapshot the code, and submit the runs as one job or array, with their evaluators.

    folder: for code, submitit's files and the jobs' output. commands: words of the `wmse` command of each run, to which its
    settings are added."""
    code = new_code_folder(folder / "code")
    # Check the options of all jobs before anything is written or submitted.
    parameters = _parameters(folder, nodes, request, code)
    _evaluator_parameters(folder, "JOB", request, code)
    # Remember what a failed launch has to restore, and which runs an earlier evaluator still follows.
    before = [read_run(open_run_folder(config.run_dir)).state for config in configs]
    followers = {config.run_dir: _active_evaluator(Path(config.run_dir)) for config in configs}
    try:
        take_snapshot(code)
        # The jobs read copies, so that the files may be edited meanwhile.
        settings = [str(save_settings(config, code)) for config in configs]
        commands = [[*words, "--config", file] for words, file in zip(commands, settings, strict=True)]
        # Mark the runs before they are submitted: a job may start at once and write its state.
        for config in configs:
            mark_run(Path(config.run_dir), "queued")
        ids = submit(folder / "slurm", parameters, commands)
    except BaseException:
        shutil.rmtree(code, ignore_errors=True)
        for config, state in zip(configs, before, strict=True):
            _restore_state(Path(config.run_dir), state)
        raise
    for config, job_id, command in zip(configs, ids, commands, strict=True):
        run_dir = Path(config.run_dir)
        # Write the record now, and again with the evaluator's job. If the evaluator cannot be submitted, the record has
        # the run's.
        record = {
            "cluster": "slurm",
            "job_id": job_id,
            "command": command,
            "code": str(code),
        }
        _write_record(run_dir, record, request)
        print(f"submitted job {job_id}: {run_dir}")
        follower = followers[config.run_dir]
        if request.with_evaluator and follower:
            print(f"evaluator {follower} still follows the run")
        elif request.with_evaluator:
            evaluator_id = _submit_evaluator(run_dir, job_id, request, code)
            record["evaluator_job_id"] = evaluator_id
            _write_record(run_dir, record, request)
            print(f"submitted job {evaluator_id}: the evaluator of this run")


def _restore_state(run_dir: Path, state: dict[str, Any]) -> None:
    """Write the state that a run had before this launch marked it. state: empty if the run had none."""
    if read_run(run_dir).state == state:
        return
    path = run_dir / "state.json"
    with suppress(OSError):  # the error that ended the launch is the one to report
        if state:
            write_text(path, json.dumps(state) + "\n")
        else:
            path.unlink()


def _active_evaluator(run_dir: Path) -> str:
    """Return the job id of an evaluator from an earlier launch that still waits or runs; empty without one."""
    job_id = text(read_run(run_dir).launch, "evaluator_job_id")
    job = find_job(job_id)
    return job_id if job_id and job and job.is_active else ""


def _submit_evaluator(run_dir: Path, job_id: str, request: Request, code: Path) -> str:
    parameters = _evaluator_parameters(run_dir, job_id, request, code)
    return submit(run_dir / "slurm", parameters, [["evaluate", "--follow", str(run_dir)]])[0]


def _evaluator_parameters(run_dir: Path, job_id: str, request: Request, code: Path) -> dict[str, Any]:
    """Return the parameters of the evaluator's job: one task, which may start once the run's job has started."""
    # Drop the options that request whole nodes: this job needs one GPU.
    # Memory and nodes were chosen for the training, and may make the small job wait for a whole node.
    small = replace(
        request.site,
        gpus_per_node=min(1, request.site.gpus_per_node),
        memory="",
        nodelist="",
        exclusive=False,
        sbatch={},
    )
    site = replace(evaluator_site(small), dependency=f"after:{job_id}")
    return job_parameters(
        site,
        name=f"{run_dir.name}-evaluator",
        nodes=(1, 1),
        tasks_per_node=1,
        code=code,
    )


def _write_record(run_dir: Path, record: dict[str, Any], request: Request) -> None:
    """Write launch.json, which tells `wmse status` and `wmse stop` what was submitted."""
    common = {
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": git_commit(),
        "nodes": request.nodes,
        "ranks_per_node": request.ranks_per_node,
    }
    write_text(run_dir / "launch.json", json.dumps({**record, **common}, indent=1) + "\n")
