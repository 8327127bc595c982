"""wmse launch: the checks before a submission, and the batch script. tests/slurm tests real jobs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer.cli import main
from trainer.cluster.slurm import submit
from trainer.cluster.snapshot import take_snapshot
from trainer.config.loading import load_config, save_config
from trainer.errors import InputError
from trainer.run.state import mark_run

Launch = Callable[..., int]


@pytest.fixture
def launch(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> Launch:
    """Return a function that runs `wmse launch` with the tiny config; by default for SLURM with --dry_run."""

    def call(*arguments: str, cluster: str = "slurm", dry_run: bool = True) -> int:
        common = ["--config", str(tiny_config), "--cluster", cluster, "--data.root", str(tiny_set)]
        end = ["--dry_run"] if dry_run else []
        return main(["launch", *common, "--run_dir", str(tmp_path / "runs" / "a"), *arguments, *end])

    return call


def test_the_batch_script_has_the_given_options(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--partition", "gpu", "--account", "me", "--qos", "high", "--constraint", "h100", "--time", "1-00:00:00",
               "--gpus_per_node", "2", "--memory", "64G", "--cpus_per_task", "8", "--exclude", "n3", "--nodelist", "n[1-2]",
               "--dependency", "afterok:7", "--mail_user", "me@example.org", "--mail_type", "END", "--exclusive", "true",
               "--signal_seconds", "300")  # fmt: skip
    assert launch("--nodes", "2", "--ranks_per_node", "1", *options) == 0
    out = capsys.readouterr().out
    script = {line.removeprefix("#SBATCH --") for line in out.splitlines() if line.startswith("#SBATCH")}
    assert script >= {"partition=gpu", "account=me", "qos=high", "constraint=h100", "time=1440", "gpus-per-node=2", "mem=64G",
                      "cpus-per-task=8", "exclude=n3", "nodelist='n[1-2]'", "dependency=afterok:7",
                      "mail-user=me@example.org", "mail-type=END", "exclusive", "signal=USR2@300", "nodes=2",
                      "ntasks-per-node=1", "requeue", "open-mode=append", "job-name=a"}  # fmt: skip
    assert not [option for option in script if option.startswith("wckey")]
    assert "srun --unbuffered" in out
    assert "--kill-on-bad-exit=0 --cpus-per-task=8" in out
    assert 'case "$code" in 75|138|140|143)' in out
    assert out.rstrip().endswith('exit "$code"')


def test_a_range_of_nodes_keeps_the_batch_and_reports_changes(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("--data.images_per_step", "48", "--nodes", "1-3", "--ranks_per_node", "1") == 0
    out = capsys.readouterr().out
    assert "1 node(s): 1 ranks, 48 images each in 3 micro-batch(es) of 16, BatchNorm statistics of 16 images" in out
    assert (
        "2 node(s): 1 ranks (1 of 2 idle: the global batch cannot be divided evenly among all), 48 images each in 3"
        in out
    )
    assert "3 node(s): 3 ranks, 16 images each in 1 micro-batch(es) of 16, BatchNorm statistics of 16 images" in out
    assert "#SBATCH --nodes=1-3" in out


def test_an_array_has_a_folder_for_each_value(
    launch: Launch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch("--array", "seed=0,7", "--nodes", "1") == 0
    out = capsys.readouterr().out
    assert f"run {tmp_path}/runs/a/seed-0\n" in out
    assert f"run {tmp_path}/runs/a/seed-7\n" in out
    assert "#SBATCH --array=0-1%2" in out
    assert f"--output={tmp_path}/runs/a/slurm/%A_%a_0_log.out" in out


def test_the_batch_script_and_the_plain_scripts_have_the_same_end(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch() == 0
    end = capsys.readouterr().out.partition("code=$?\n")[2].strip()
    for name in ("pretrain", "evaluate"):
        assert (ROOT / "slurm" / f"{name}.sbatch").read_text().partition("code=$?\n")[2].strip() == end


@pytest.mark.parametrize(
    ("variables", "requeued"),
    [
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2"),
    ],
)
@pytest.mark.parametrize("code", [0, 1, 2, 75, 137, 143])
def test_only_a_preempted_job_is_requeued_and_of_an_array_only_the_task(
    code: int, variables: dict[str, str], requeued: str, tmp_path: Path
) -> None:
    """This runs the plain script with stand-ins for SLURM's programs. The last task of an array has the array's id."""
    for name, line in (("srun", f"exit {code}"), ("scontrol", f"echo $@ >> {tmp_path}/calls"), ("sleep", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), **variables}
    done = subprocess.run(["bash", ROOT / "slurm" / "pretrain.sbatch", "a.yaml"], env=env, check=False)
    assert done.returncode == code
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert set(calls) == ({f"requeue {requeued}"} if code in (75, 143) else set())


def test_configs_of_one_name_do_not_share_a_folder(
    launch: Launch, capsys: pytest.CaptureFixture[str], tiny_config: Path, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    shutil.copy(tiny_config, tmp_path / "more")
    assert launch("--array", f"config={tiny_config},{tmp_path}/more/{tiny_config.name}") == 2
    assert "two values would share a run folder" in capsys.readouterr().err


def test_an_array_over_configs_has_a_folder_for_each_config(
    launch: Launch, capsys: pytest.CaptureFixture[str], tiny_config: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    shutil.copy(tiny_config, other)
    assert launch("--array", f"config={tiny_config},{other}") == 0
    assert f"run {tmp_path}/runs/a/config-other\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "3"], "16, which cannot be divided evenly among 3 ranks"),
        (["--nodes", "x"], "--nodes is 'x'"),
        (["--ranks_per_node", "0"], "--ranks_per_node is 0"),
        (["--data.root", "/nowhere"], "/nowhere"),
        (["--data.images_per_step", "17"], "not a multiple of wmse.slice_size"),
        (["--array", "sede=1,2"], "--array is 'sede=1,2'"),
        (["--array", "seed"], "--array is 'seed'"),
        (["--array", "seed=1,1"], "is listed twice"),
        (["--run_dir", ""], "run_dir is not set"),
        (["--run_dir", "", "--array", "seed=1,2"], "run_dir is not set"),
        (["--array", "run_dir=a,b"], "--array is 'run_dir=a,b'"),
        (["--run_dir", "a%j"], "names in batch scripts may not have %"),
        (["--run_dir", str(ROOT / "trainer" / "x")], "is inside the code of this program"),
        (["--partitoin", "low"], "unknown setting partitoin"),
        (["--site", "/no/site.yaml"], "the file /no/site.yaml does not exist"),
        (["--data_on_nodes"], "set data.expected_images"),
    ],
)
def test_a_run_that_cannot_train_is_refused_before_submission(
    arguments: list[str], message: str, launch: Launch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "#SBATCH" not in captured.out
    assert not (tmp_path / "runs").exists()


def test_data_on_the_nodes_are_not_opened_on_this_machine(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--data.root", "/local/set", "--data_on_nodes", "--data.expected_images", "480") == 0
    assert "images: 480 in /local/set" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--nodes", "2"], ["--partition", "low"], ["--site", "x.yaml"]])
def test_options_of_a_cluster_are_refused_for_this_machine(
    arguments: list[str], launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*arguments, cluster="local") == 2
    assert "this machine" in capsys.readouterr().err


def test_later_edits_do_not_change_a_submitted_run(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings and code are copied, paths are absolute, and launch.json records the job. Scripts stand in for SLURM."""
    for name, line in (("srun", "true"), ("sbatch", f"echo $1 >> {tmp_path}/scripts; echo Submitted batch job 77")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    options = ("--run_dir", "runs/b", "--nodes", "1-3", "--data.images_per_step", "48", "--with_evaluator")
    assert launch(*options, dry_run=False) == 0
    assert (
        f"submitted job 77: {tmp_path}/runs/b\nsubmitted job 77: the evaluator of this run" in capsys.readouterr().out
    )
    run_dir = tmp_path / "runs" / "b"
    record = json.loads((run_dir / "launch.json").read_text())
    assert (record["job_id"], record["nodes"], record["ranks_per_node"]) == ("77", "1-3", 1)
    assert json.loads((run_dir / "state.json").read_text())["status"] == "queued"
    assert (Path(record["code"]) / "trainer" / "loop.py").exists()
    config = load_config(Path(record["command"][2]), [])
    assert config.run_dir == str(run_dir)
    assert config.allow_idle_ranks
    assert config.optimizer.images_per_micro_batch == 16
    assert len((tmp_path / "scripts").read_text().splitlines()) == 2


def test_a_wrong_option_for_the_evaluator_changes_nothing(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text("evaluator: {partitoin: x}\n")
    run_dir = tmp_path / "runs" / "a"
    run_dir.mkdir(parents=True)
    (run_dir / "state.json").write_text('{"status": "done"}')
    assert launch("--site", str(tmp_path / "site.yaml"), dry_run=False) == 2
    assert "unknown option partitoin" in capsys.readouterr().err
    assert (run_dir / "state.json").read_text() == '{"status": "done"}'


@pytest.mark.parametrize("folder", ["tiny.yaml/x", "n" * 300, "a\0b"])
def test_an_impossible_run_folder_is_refused(
    folder: str, launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("--run_dir", f"{tmp_path}/{folder}", dry_run=False) == 2
    assert "run_dir is" in (text := capsys.readouterr().err) or "cannot create the run folder" in text


def test_a_running_run_or_one_with_other_settings_is_refused(
    launch: Launch, tmp_path: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "runs" / "a"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_00000001.pt").touch()
    save_config(load_config(tiny_config, []), run_dir / "config.yaml")
    assert launch("--seed", "3", "--data.threads", "2") == 2
    assert "holds a run with other settings:\n  - seed: 0 -> 3\n" in capsys.readouterr().err
    assert launch("--seed", "3", "--allow_changes", "true") == 0
    state = {"status": "running", "heartbeat": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
    (run_dir / "state.json").write_text(json.dumps(state))
    assert launch() == 2
    assert f"is in use by process {os.getpid()} on {socket.gethostname()}: end it" in capsys.readouterr().err


def test_micro_batches_on_fewer_nodes_hold_whole_slices(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    """On two nodes a rank holds half a slice, and two ranks whiten together. On one node that is impossible."""
    assert launch("--nodes", "1-2", "--ranks_per_node", "1") == 0
    out = capsys.readouterr().out
    assert "1 node(s): 1 ranks, 16 images each in 1 micro-batch(es) of 16" in out
    assert "2 node(s): 2 ranks, 8 images each in 1 micro-batch(es) of 8" in out


def test_the_dry_run_also_shows_the_script_of_the_evaluator(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--with_evaluator") == 0
    out = capsys.readouterr().out
    assert out.count("#!/bin/bash") == 2
    assert "#SBATCH --dependency=after:JOB" in out


def test_a_run_whose_job_is_queued_is_not_submitted_twice(
    launch: Launch, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '7|PENDING|N/A|Priority'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "launch.json").write_text(json.dumps({"job_id": "7"}))
    assert launch() == 2
    assert "is in use by SLURM job 7 (PENDING): end it" in capsys.readouterr().err


def test_a_finished_run_can_be_launched_although_slurm_does_not_answer(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    state = {"status": "paused", "job": {"id": "7"}, "heartbeat": time.time(), "exit_code": 0}
    (tmp_path / "runs" / "a" / "state.json").write_text(json.dumps(state))
    assert launch() == 0


def test_a_launch_that_fails_half_way_leaves_no_code_and_no_run_marked_as_queued(
    launch: Launch, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the second of two runs is marked; the first had a state before."""
    runs = tmp_path / "runs" / "a"
    (runs / "seed-0").mkdir(parents=True)
    (runs / "seed-0" / "state.json").write_text('{"status": "done"}\n')

    def mark_first_run_only(run_dir: Path, status: str) -> None:
        if run_dir.name != "seed-0":
            raise OSError(errno.ENOSPC, "No space left on device", str(run_dir / "state.json"))
        mark_run(run_dir, status)

    monkeypatch.setattr("trainer.cluster.launch.mark_run", mark_first_run_only)
    assert launch("--array", "seed=0,7", dry_run=False) == 2
    assert f"cannot write {runs}/seed-7/state.json: No space left" in capsys.readouterr().err
    assert (runs / "seed-0" / "state.json").read_text() == '{"status": "done"}\n'
    assert not (runs / "seed-7" / "state.json").exists()
    assert list((runs / "code").iterdir()) == []


def test_without_slurm_nothing_is_submitted_and_no_state_is_written(
    launch: Launch, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch(dry_run=False) == 2
    assert "srun was not found" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "a" / "state.json").exists()
    assert list((tmp_path / "runs" / "a" / "code").iterdir()) == []
    with pytest.raises(InputError, match="srun was not found"):
        submit(tmp_path, {}, [["pretrain"]])


def test_a_snapshot_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "code" / "trainer" / "cli.py" / "cli.py").mkdir(parents=True)  # in the way of the file
    with pytest.raises(InputError, match=r"cannot copy the program to .*code/trainer/cli\.py: .*Is a directory"):
        take_snapshot(tmp_path / "code")
