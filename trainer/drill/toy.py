"""The toy run of a drill: a small image folder, its settings, and processes that train on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainer.config.schema import DataConfig
from trainer.data.index import open_images
from trainer.diff.compare import compare_runs
from trainer.diff.sides import read_side
from trainer.errors import TrainingFailedError
from trainer.files import shipped_folder, write_text

STEPS = 60
SAVE_EVERY = 5
_IMAGES = 96
_SETTINGS = f"""
deterministic: true
compile: "false"
precision: fp32
data: {{images_per_step: 16, threads: 1, test_split: train}}
views: {{num_views: 2, size: 32, interpolation: bilinear, blur_probability: 0, mean: [0.3, 0.3, 0.3], std: [0.3, 0.3, 0.3]}}
model: {{backbone: test_resnet, stem: half, zero_init_last: false, projector: mlp, projector_hidden: [32], embedding_size: 8}}
wmse: {{slice_size: 16}}
optimizer: {{name: adam, learning_rate: 1e-3, learning_rate_rule: fixed, epochs: {STEPS * 16 // _IMAGES}, warmup_steps: 10}}
checkpoint: {{every_minutes: 0, every_steps: {SAVE_EVERY}}}
log: {{every_steps: 1, tensorboard: false}}
"""
_LIMIT = 180.0  # seconds for a run of some seconds, on a busy machine and a slow file system


class ToyRun:
    """Process that trains in a run folder."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, output: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self._output = output

    def step(self) -> int:
        """Return the number of steps that the run has logged."""
        # A line without its end is still being written.
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return sum(line.endswith(b"}") for line in lines)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has logged a step. Raises TrainingFailedError if it ends or hangs before."""
        self._wait_until(lambda: self.step() >= step, f"reach step {step}")

    def wait_for_output(self, text: str) -> None:
        """Wait until the run has printed a text. Raises TrainingFailedError if it ends or hangs before."""
        self._wait_until(lambda: text in self._output.read_text(errors="replace"), f"print {text!r}")

    def _wait_until(self, reached: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _LIMIT
        while not reached():
            if self.process.poll() is not None or time.monotonic() > end:
                raise TrainingFailedError(f"the toy run did not {what}:\n{self.output()}")
            time.sleep(0.01)

    def send(self, signal: int) -> None:
        """Send a signal to the process."""
        self.process.send_signal(signal)

    def wait(self) -> int:
        """Wait for the end and return the exit code, negative for a signal. A run that hangs is killed."""
        try:
            return self.process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def output(self) -> str:
        """Return the end of what the process has written."""
        return self._output.read_text(errors="replace")[-800:]


class Toy:
    """Image folder and settings of the toy runs, in a new folder."""

    def __init__(self, folder: Path, outputs: Path) -> None:
        """outputs: folder for what the processes print, on a file system that stays sound."""
        self.folder = folder
        self._outputs = outputs
        self._runs = 0
        write_text(folder / "toy.yaml", _SETTINGS)
        index = open_images(DataConfig(root=str(shipped_folder("demo_data"))), "train")
        # An image folder, whose files a scenario can damage one by one.
        images = folder / "images" / "train" / "photographs"
        images.mkdir(parents=True)
        for number in range(_IMAGES):
            suffix = Path(index.name(number)).suffix
            (images / f"{number:03d}{suffix}").write_bytes(index.read(number))

    def copy_images(self) -> Path:
        """Copy the image folder, so that a scenario can damage it. Returns the copy."""
        self._runs += 1
        return Path(shutil.copytree(self.folder / "images", self.folder / f"images_{self._runs}"))

    def new_run(self) -> Path:
        """Return the folder of a new run, which does not exist yet."""
        self._runs += 1
        return self.folder / f"run_{self._runs}"

    def start(self, run_dir: Path, images: Path | None = None, max_steps: int = 0) -> ToyRun:
        """Start or resume a run. images: None: the undamaged folder. max_steps: pause after this step; 0: run to the end."""
        output = self._outputs / f"{run_dir.name}.log"
        command = [sys.executable, "-m", "trainer", "pretrain", "--config", str(self.folder / "toy.yaml")]
        command += ["--data.root", str(images or self.folder / "images"), "--run_dir", str(run_dir)]
        command += ["--max_steps", str(max_steps)]
        # The process starts in another folder, where it would not find a checkout of the program.
        own = Path(__file__).parents[2]
        # A launcher's variables would make the toy run wait for other ranks.
        kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHERS}
        environment = kept | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(own), *sys.path]),
        }
        # In a session of its own, so that Ctrl-C in a terminal does not reach it.
        with output.open("ab") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, cwd=self.folder, start_new_session=True
            )
        return ToyRun(process, run_dir, output)

    def finish(self, run_dir: Path, images: Path | None = None, max_steps: int = 0) -> list[str]:
        """Start or resume a run and wait for its end. Returns what went wrong. The arguments are those of `start`."""
        run = self.start(run_dir, images, max_steps)
        code = run.wait()
        return [] if code == 0 else [f"{run_dir.name} ended with exit code {code}: {run.output()}"]


_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
)


def differences(run_dir: Path, whole: Path) -> list[str]:
    """Compare all logged lines and the weights of two finished runs, bit for bit. Returns what differs."""
    found = compare_runs(read_side("A", whole), read_side("B", run_dir))
    if found.identical_to == STEPS and found.parts_at is None:
        return []
    return [f"{run_dir.name}: {found.verdict()}"]


def skipped_images(run_dir: Path) -> set[str]:
    """Return the names of the images that a run has skipped."""
    path = run_dir / "quarantine.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {Path(json.loads(line)["image"]).name for line in lines}
