"""wmse sweep: definitions, what is started and skipped, the table. Runs are started in this process, not in their own."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, TINY
from trainer.cli import main
from trainer.cluster.runs import find_runs
from trainer.config.loading import load_config, save_config
from trainer.config.schema import METHODS
from trainer.report.plots import Band, draw_bands
from trainer.run.folder import lock_run_folder
from trainer.sweep.definition import SweepRun, read_sweep
from trainer.sweep.progress import is_trained, why_unfinished
from trainer.sweep.task import run_task

RECIPE = "cifar10_rn18_wmse2_1000ep"  # the paper has a figure for a config of this name
Sweep = Callable[..., int]


class InProcess:
    """Stands in for the process of a run."""

    started: list[tuple[list[str], dict[str, str]]]
    """Words and environment of each."""
    runs = True
    """Whether to run the command, or only to note it."""

    def __init__(self, words: Sequence[str], env: dict[str, str], output: Any) -> None:
        self.started.append((list(words), env))
        self.returncode = main(words) if self.runs else 0

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> type[InProcess]:
    """Start runs in this process, and return the class that notes them."""
    monkeypatch.setattr("trainer.sweep.local.start", InProcess)
    monkeypatch.setattr(InProcess, "started", [], raising=False)
    return InProcess


def write_sweep(folder: Path, data: Path, text: str) -> Path:
    """Write the tiny config and a sweep of it."""
    (folder / f"{RECIPE}.yaml").write_text(TINY)
    path = folder / "sweep.yaml"
    head = f"config: {folder / RECIPE}.yaml\nsettings: {{data.root: {data}, optimizer.epochs: 2, wmse.permutation_block: 16}}\n"
    path.write_text(head + text)
    return path


def read(file: Path, *settings: str) -> list[SweepRun]:
    return read_sweep(file, [], "", settings, Path("out"))


# --- the definition ---


def test_each_row_runs_once_for_each_seed_and_varied_value(tmp_path: Path, tiny_set: Path) -> None:
    rows = "rows:\n  A: {}\n  'B, k=4': {model: {embedding_size: 4}, wmse.eps: 0.1}\n"
    file = write_sweep(
        tmp_path, tiny_set, f"seeds: [0, 7]\nprotocols: [knn]\n{rows}vary: {{wmse.iterations: [1, 2]}}\n"
    )
    runs = read(file, "--wmse.eps", "0.5")
    names = ["A, iterations=1", "A, iterations=2", "B, k=4, iterations=1", "B, k=4, iterations=2"]
    assert [(run.row, run.seed) for run in runs] == [(name, seed) for name in names for seed in (0, 7)]
    assert runs[-1].run_dir == Path("out/b_k=4_iterations=2/seed_7").absolute()
    for run in runs:
        config = run.config
        assert config == load_config(run.file, run.words), "the command of the run has other settings"
        assert (config.seed, config.optimizer.epochs, config.evaluate.protocols) == (run.seed, 2, ("knn",))
        assert config.wmse.eps == 0.5, "the command line overrides the row"
    assert [run.config.model.embedding_size for run in runs] == [8] * 4 + [4] * 4
    assert [run.config.wmse.iterations for run in runs[::2]] == [1, 2, 1, 2]


def test_configs_without_a_file_are_rows(tmp_path: Path, tiny_set: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(TINY + f"wmse.eps: 0.{len(name) + ord(name) % 2}\n")
    runs = read_sweep(None, [tmp_path / "a.yaml", tmp_path / "b.yaml"], "3,4", [], tmp_path)
    assert [run.name for run in runs] == ["a, seed 3", "a, seed 4", "b, seed 3", "b, seed 4"]


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs" / "sweeps").glob("*.yaml")))
def test_a_shipped_sweep_is_found_by_its_name(name: str) -> None:
    runs = read(Path(name))
    assert len({run.run_dir for run in runs}) == len(runs) > 3
    whitened = [
        run.config for run in runs if run.config.method == "wmse" and run.config.wmse.whitening != "standardise"
    ]
    assert {config.wmse.slice_size / config.model.embedding_size for config in whitened} == {2.0}
    if name == "demo_methods":
        assert {run.config.method for run in runs} == set(METHODS)
        views = [run.config.data.images_per_step * run.config.views.num_views for run in runs]
        assert set(views) == {512}


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("rows: {A: {}}\nseed: [1]", ["unknown key seed: did you mean seeds?"]),
        ("rows: [A]", ["rows is ['A']: give a mapping"]),
        ("seeds: [0]", ["there are no rows: give `rows`"]),
        ("rows: {A: 3}", ["row A is '3': give the settings of the row"]),
        ("rows: {A: {}}\nseeds: [0, 0]", ["seeds is ['0', '0']: give different whole numbers"]),
        ("rows: {A: {}}\nseeds: [-1]", ["seeds is ['-1']"]),
        ("rows: {A: {}}\nvary: {seed: 3}", ["vary: seed is '3': give a list of values"]),
        ("rows: {A: {}}\nvary: {seed: [1, 2]}", ["vary: seed does not belong here: give `seeds`"]),
        ("rows: {A: {run_dir: x}}", ["row A: run_dir does not belong here: --out DIR"]),
        (
            "rows: {A: {wmse.epss: 1}, B: {epochs: 3}}",
            ["row A: unknown setting wmse.epss", "row B: unknown setting epochs"],
        ),
        ("rows: {A: {}, a: {wmse.eps: 1}}", ["rows 'A' and 'a' would share the folder a: rename"]),
        ("rows: {'!': {}}", ["row '!' gives no name for a folder"]),
        ("rows: {A: {}, B: {wmse.eps: 0}}", ["rows 'A' and 'B' have the same settings: remove one"]),
        (
            "rows: {A: {wmse.eps: x}, B: {method: byoll}, C: {config: nothing.yaml}}",
            [
                "3 problem(s)",
                "row A: ",
                "wmse.eps is 'x'",
                "row B: ",
                "did you mean byol?",
                "row C: ",
                "nothing.yaml does not",
            ],
        ),
    ],
)
def test_all_problems_of_a_definition_are_named(
    text: str, messages: list[str], tmp_path: Path, tiny_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_sweep(tmp_path, tiny_set, text)
    assert main(["sweep", str(file), "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    for message in messages:
        assert message in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["paper_step_times"], "--out is missing"),
        (["--out", "out"], "no sweep is given"),
        (["demo_method", "--out", "out"], "neither a file nor the name of a sweep: did you mean demo_methods?"),
        (["paper_step_times", "--out", "out", "--config", "a.yaml"], "--config does not apply"),
        (["--out", "out", "--config", "a/x.yaml", "--config", "b/x.yaml"], "x is the name of two files"),
        (["paper_step_times", "--out", "out", "--jobs", "0"], "--jobs is 0"),
        (["paper_step_times", "--out", "out", "--seeds", "a"], "seeds is ['a']"),
        (["paper_step_times", "--out", "out", "--seed", "1"], "give `seeds`, or --seeds 0,1,2, not --seed"),
        (["paper_step_times", "--out", "out", "--run_dir", "x"], "--out DIR is the folder of all runs, not --run_dir"),
        (["paper_step_times", "--out", "out", "--retry"], "unknown setting retry"),
        (["paper_step_times", "--out", "out", "--partition", "x"], "--partition only applies to --slurm"),
        (["paper_step_times", "--out", "out", "--slurm", "--table"], "--slurm excludes --table"),
        (["paper_step_times", "--out", "out", "--slurm", "--gpus_per_node", "8"], "give --gpus_per_node 1"),
        (["paper_step_times", "--out", "out", "--data.root", "/nowhere"], "4 run(s) do not fit"),
    ],
)
def test_wrong_options_start_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- a sweep that has ended: a row with two seeds, and one that diverges ---

ROWS = """
seeds: [0, 1]
rows:
  Good | *: {checkpoint.keep_every_epochs: 1}
  Bad: {optimizer.learning_rate: 1.e+30, max_skipped_steps: 0}
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, tiny_set: Path) -> tuple[Path, Path, int]:
    """Return the file of the sweep, its folder and its exit code."""
    folder = tmp_path_factory.mktemp("sweep")
    file = write_sweep(folder, tiny_set, ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.sweep.local.start", InProcess)
        patch.setattr(InProcess, "started", [], raising=False)
        code = main(["sweep", str(file), "--out", str(folder / "out")])
    return file, folder / "out", code


@pytest.fixture
def sweep(ended: tuple[Path, Path, int], processes: type[InProcess], tmp_path: Path) -> Sweep:
    """Return a function that runs the sweep again, in a copy of its folder: TMP_PATH/out."""
    file, out, _ = ended
    shutil.copytree(out, tmp_path / "out")

    def call(*options: str, file: Path = file) -> int:
        return main(["sweep", str(file), "--out", str(tmp_path / "out"), *options])

    return call


def table(out: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of table.json by their names."""
    return {row["row"]: row for row in json.loads((out / "table.json").read_text())["rows"]}


def state(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "state.json").read_text())


@pytest.mark.slow
def test_the_table_has_mean_and_spread_over_the_seeds(ended: tuple[Path, Path, int]) -> None:
    _, out, _ = ended
    row = table(out)["Good | *"]
    for label, name, key in (("linear, top1", "linear", "top1"), ("5-nn, top1", "knn", "top1"),
                             ("linear, standardised top1", "linear", "standardised_top1")):  # fmt: skip
        for column, checkpoint in (("trained", 6), ("untrained", "random")):
            files = [out / "good" / f"seed_{seed}" / "eval" / f"{name}_{checkpoint}.json" for seed in (0, 1)]
            values = [json.loads(path.read_text())[key] for path in files]
            found = row["figures"][label][column]
            assert found["by_seed"] == {"0": values[0], "1": values[1]}
            assert found["mean"] == pytest.approx(np.mean(values))
            assert found["spread"] == pytest.approx(np.std(values, ddof=1))
    assert (row["seeds"], row["finished"], row["steps"], row["views"]) == (2, 2, 6, 6 * 16 * 2)
    text = (out / "table.md").read_text()
    mean, spread = (row["figures"]["5-nn, top1"]["trained"][key] for key in ("mean", "spread"))
    assert "| Good \\| \\* | 2 | 6 | 192 | " in text
    assert f" {mean:.2f} ± {spread:.2f} |" in text


@pytest.mark.slow
def test_a_run_that_diverged_stands_in_the_table_with_step_and_reason(ended: tuple[Path, Path, int]) -> None:
    _, out, code = ended
    row = table(out)["Bad"]
    assert code == 1, "not all runs are finished"
    assert (row["finished"], row["steps"]) == (0, None)
    step = state(out / "bad" / "seed_0")["diverged"]["step"]
    assert row["unfinished"]["0"].startswith(f"diverged at step {step}: rank 0: a slice of view")
    assert f"seed 0, 1: diverged at step {step}: " in (out / "table.md").read_text()
    assert row["figures"]["5-nn, top1"]["trained"] is None


@pytest.mark.slow
def test_the_untrained_encoder_is_measured_once_for_each_seed(ended: tuple[Path, Path, int]) -> None:
    _, out, _ = ended
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*_random.json"))
    assert files == [f"good/seed_{seed}/eval/{name}_random.json" for seed in (0, 1) for name in ("knn", "linear")]
    rows = table(out)
    assert rows["Bad"]["figures"]["5-nn, top1"]["untrained"] == rows["Good | *"]["figures"]["5-nn, top1"]["untrained"]


@pytest.mark.slow
def test_the_papers_figure_is_marked_if_the_settings_differ(ended: tuple[Path, Path, int]) -> None:
    _, out, _ = ended
    paper = table(out)["Good | *"]["figures"]["linear, top1"]["paper"]
    assert paper["top1"] == 91.55
    assert "optimizer.epochs: 1000 -> 2" in paper["differences"]
    text = (out / "table.md").read_text()
    assert " 91.55\\* |" in text
    assert "optimizer.epochs: 1000 -> 2" in text


@pytest.mark.slow
def test_curves_are_drawn_if_checkpoints_were_kept(ended: tuple[Path, Path, int]) -> None:
    _, out, _ = ended
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "good" / "seed_0" / "eval" / "knn_3.json").exists()


@pytest.mark.slow
def test_a_finished_or_failed_run_is_not_started_again(
    sweep: Sweep, processes: type[InProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep() == 1
    assert processes.started == []
    shown = capsys.readouterr().out
    assert "[1/4] Good | *, seed 0: is finished\n" in shown
    assert "[3/4] Bad, seed 0: diverged at step" in shown


@pytest.mark.slow
def test_a_failed_run_is_started_again_on_request(sweep: Sweep, processes: type[InProcess], tmp_path: Path) -> None:
    assert sweep("--retry_failed") == 1
    assert [state(tmp_path / "out" / row / "seed_0")["starts"] for row in ("good", "bad")] == [1, 2]
    assert len(processes.started) == 2


@pytest.mark.slow
def test_other_settings_of_the_evaluation_only_measure_again(
    sweep: Sweep, processes: type[InProcess], tmp_path: Path
) -> None:
    assert sweep("--knn.k", "3") == 1
    good = tmp_path / "out" / "good" / "seed_1"
    assert state(good)["starts"] == 1
    figures = table(tmp_path / "out")["Good | *"]["figures"]
    assert "5-nn, top1" not in figures
    assert set(figures["3-nn, top1"]["trained"]["by_seed"]) == {"0", "1"}
    assert set(figures["3-nn, top1"]["untrained"]["by_seed"]) == {"0", "1"}
    assert len(processes.started) == 2
    # The earlier results are still there, so nothing is left to do for the earlier definition.
    assert sweep() == 1
    assert len(processes.started) == 2


@pytest.mark.parametrize("options", [[], ["--table"]])
@pytest.mark.slow
def test_another_definition_of_a_row_is_refused(
    options: list[str], sweep: Sweep, processes: type[InProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--wmse.eps", "0.1", *options) == 2
    shown = capsys.readouterr().err
    assert "Good | *, seed 0: " in shown
    assert "holds a run with other settings:" in shown
    assert "wmse.eps: 0.0 -> 0.1" in shown
    assert processes.started == []


@pytest.mark.slow
def test_the_table_of_a_sweep_can_be_made_anywhere(
    sweep: Sweep, processes: type[InProcess], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The data set is not there, and a run has not started."""
    before = table(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "bad" / "seed_1")
    (tmp_path / "out" / "table.json").unlink()
    assert sweep("--table", "--data.root", "/nowhere") == 0
    after = table(tmp_path / "out")
    assert after["Good | *"]["figures"]["5-nn, top1"] == before["Good | *"]["figures"]["5-nn, top1"]
    assert after["Bad"]["unfinished"]["1"] == "not started"
    assert "diverged at step" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_its_results_is_measured(sweep: Sweep, tmp_path: Path) -> None:
    good = tmp_path / "out" / "good" / "seed_0"
    (good / "eval" / "knn_6.json").unlink()
    config = load_config(good / "config.yaml", [f"--run_dir={good}"])
    assert is_trained(config)
    assert why_unfinished(config) == "not evaluated"
    sweep()
    assert why_unfinished(config) == ""
    assert state(good)["starts"] == 1


@pytest.mark.slow
def test_two_sweeps_do_not_share_a_folder(sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_run_folder(tmp_path / "out"):
        assert sweep() == 2
    assert f"{tmp_path / 'out'} is in use by another process" in capsys.readouterr().err


# --- starting ---


def test_runs_at_the_same_time_share_cores_and_gpus(
    processes: type[InProcess], tmp_path: Path, tiny_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "runs", False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = write_sweep(tmp_path, tiny_set, "rows: {A: {data.threads: 0}, B: {wmse.eps: 0.1}}")
    assert main(["sweep", str(file), "--out", str(tmp_path / "out"), "--jobs", "9"]) == 1
    (first, first_env), (second, second_env) = processes.started
    assert first[-1] == "--data.threads=4"
    assert "--data.threads=4" not in second, "the row has its own number of threads"
    assert (first_env["CUDA_VISIBLE_DEVICES"], second_env["CUDA_VISIBLE_DEVICES"]) == ("3", "5")
    assert first_env["OMP_NUM_THREADS"] == "4"


@pytest.mark.slow
def test_on_slurm_each_run_is_a_task_of_one_array(
    tmp_path: Path, tiny_set: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts stand in for SLURM's programs. The command of a task trains and measures its run."""
    for name, line in (
        ("srun", "true"),
        ("sbatch", f"cp $1 {tmp_path}/script; echo Submitted batch job 77"),
        ("squeue", "echo '77_0|PENDING|N/A|Priority'; echo '77_1|COMPLETED|N/A|None'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    file = write_sweep(tmp_path, tiny_set, "rows: {A: {}, B: {optimizer.learning_rate: 0.01}}")
    out = tmp_path / "out"
    words = ["sweep", str(file), "--out", str(out), "--slurm", "--partition", "low", "--signal_seconds", "60"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert f"submitted job 77_0: {out}/a/seed_0\nsubmitted job 77_1: {out}/b/seed_0\n" in shown
    assert f"`wmse status {out}`" in shown
    assert find_runs([out]) == [out / "a" / "seed_0", out / "b" / "seed_0"], "wmse status does not find the runs"
    assert re.search(r"--array=0-1%", (tmp_path / "script").read_text())
    record = json.loads((out / "b" / "seed_0" / "launch.json").read_text())
    # The first run of an encoder also measures it untrained.
    assert record["command"][:3] == ["sweep", "--task", "--config"]
    assert "--untrained" in json.loads((out / "a" / "seed_0" / "launch.json").read_text())["command"]

    assert main(record["command"]) == 0
    assert state(out / "b" / "seed_0")["status"] == "done"
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "A, seed 0: waits or runs as SLURM job 77_0" in shown
    assert "nothing to submit" in shown


def test_a_preempted_task_asks_to_be_started_again(
    tmp_path: Path, tiny_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation would take the time that is left before the job is killed."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    commands: list[Sequence[str]] = []
    (tmp_path / "run").mkdir()
    save_config(load_config(tmp_path / "tiny.yaml", []), tmp_path / "run" / "config.yaml")
    monkeypatch.setattr("trainer.cli.COMMANDS", {"pretrain": lambda words: 75, "evaluate": commands.append})
    words = ["--run_dir", str(tmp_path / "run"), "--data.root", str(tiny_set)]
    assert run_task(tmp_path / "tiny.yaml", words, untrained=True) == 75
    assert commands == []


def test_a_band_has_the_spread_of_its_row() -> None:
    nan = float("nan")
    picture = draw_bands({"top1": [Band("a $x$", [1, 2], [50, 60], [nan, 2], "#0072B2")]}, "epoch")
    assert picture.startswith(b"\x89PNG")
