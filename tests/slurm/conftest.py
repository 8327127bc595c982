"""Fixtures of `make test-slurm`: one SLURM cluster for all tests of this folder, and runs on it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, write_images
from tests.slurm.jobs import Job, launch, leftovers, submitted

CLUSTER = ROOT / "tests" / "slurm" / "cluster"
PROGRAMS = ("munged", "sbatch", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "mariadb-install-db")
FOLDER = "WMSE_TEST_CLUSTER"  # environment variable with the cluster's folder, for pytest's workers


# --- the cluster ---


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist starts the workers, so that they inherit the environment
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the cluster in the process that starts the workers. Fail, and do not skip, if that is impossible."""
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing:
        packages = (CLUSTER / "packages.txt").read_text().replace("\n", " ")
        pytest.exit(f"no {', '.join(missing)}: apt-get install --no-install-recommends {packages}", returncode=1)
    if os.geteuid() != 0:
        pytest.exit("the pretend nodes have different host names, which only root may set: run as root", returncode=1)
    folder = Path(tempfile.mkdtemp(prefix="wmse_slurm_"))
    os.environ[FOLDER] = str(folder)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PATH"] = path
    os.environ["WMSE_PYTHON"] = sys.executable  # for the sbatch scripts
    os.environ["PYTHONPATH"] = str(ROOT)
    started = subprocess.run([CLUSTER / "start.sh", folder], stderr=subprocess.PIPE, text=True, check=False)
    if started.returncode:
        stop_cluster(folder)
        pytest.exit(started.stderr, returncode=1)
    for split, count in (("train", 24), ("val", 8)):
        for number, name in enumerate(("cats", "dogs")):
            write_images(folder / "set" / split / name, count, seed=number + 10 * (split == "val"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the cluster, also after a failure."""
    if not hasattr(session.config, "workerinput") and FOLDER in os.environ:
        stop_cluster(Path(os.environ[FOLDER]))


def stop_cluster(folder: Path) -> None:
    """Stop all processes of the cluster and delete its folder."""
    subprocess.run([CLUSTER / "stop.sh", folder], check=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def cluster() -> Path:
    """Return the cluster's folder, which also holds the tiny image folder."""
    assert FOLDER in os.environ, "the cluster was not started: run `make test-slurm`, or pytest on this folder alone"
    return Path(os.environ[FOLDER])


@pytest.fixture
def nodes(cluster: Path) -> Iterator[list[str]]:
    """Return two nodes that no other worker uses. Check after the test that no process or file is left on them."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    mine = [f"n{2 * worker + 1}", f"n{2 * worker + 2}"]
    yield mine
    if submitted:
        subprocess.run(["scancel", *submitted], check=True)
        submitted.clear()
    left = {node: leftovers(cluster, node) for node in mine}
    assert left == {node: [] for node in mine}


# --- runs on it ---


@pytest.fixture
def config(cluster: Path, tmp_path: Path) -> Path:
    """Return the config of a run of 120 short steps that saves checkpoints only on request."""
    return write_config(cluster, tmp_path)


def write_config(cluster: Path, folder: Path) -> Path:
    """Write that config to `folder` and return its path."""
    path = folder / "tiny.yaml"
    text = TINY.replace("epochs: 3", "epochs: 40").replace("data: {", f"data: {{root: {cluster / 'set'}, ")
    path.write_text(text)
    return path


@pytest.fixture
def unbroken(cluster: Path, nodes: list[str]) -> Job:
    """Return the job of an uninterrupted run with one rank on each of two nodes. The first test that needs it starts it."""
    run_dir = cluster / "unbroken"
    with (cluster / "unbroken.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run_dir / "launch.json").exists():
            launch(write_config(cluster, cluster), run_dir, nodes)
        job = Job.of(run_dir)
        job.wait_for("COMPLETED")
    return job
