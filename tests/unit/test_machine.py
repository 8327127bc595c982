"""Provenance of a measurement: machine, versions and commit."""

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

from trainer.run import commit as commit_module
from trainer.run import machine

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, script: str) -> None:
    """Write a shell script as a program of this name."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_versions_on_a_cpu_have_no_driver(programs: Path) -> None:
    install(programs, "nvidia-smi", "echo 580.1; exit 0")
    found = machine.versions(CPU)
    assert found["torch"] == torch.__version__
    assert found.get("triton") == next((d.version for d in metadata.distributions(name="triton")), None)
    assert not {"cuda", "driver"} & set(found), "a measurement on a CPU uses no driver"


def test_versions_omit_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert set(machine.versions(CPU)) == {"python", "torch"}


def test_versions_on_a_gpu_have_cuda_and_driver(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert machine.versions(GPU)["driver"] == "unknown", "no nvidia-smi"
    install(
        programs,
        "nvidia-smi",
        'test "$*" = "--query-gpu=driver_version --format=csv,noheader" && echo 580.1 && echo 580.1',
    )
    found = machine.versions(GPU)
    assert (found["cuda"], found["driver"]) == ("13.0", "580.1"), "nvidia-smi prints one line for each GPU"
    install(programs, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert machine.versions(GPU)["driver"] == "unknown"


def test_the_commit_says_whether_the_program_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    (tmp_path / "machine.py").write_text("1")
    monkeypatch.setattr(commit_module, "__file__", str(tmp_path / "machine.py"))
    monkeypatch.setenv("WMSE_COMMIT", "0123456789ab")
    assert commit_module.git_commit() == "0123456789ab", "without a repository the variable is used"
    monkeypatch.delenv("WMSE_COMMIT")
    assert commit_module.git_commit() is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    git("tag", "v1")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    (tmp_path / "result.json").write_text("{}")
    assert commit_module.git_commit() == commit
    (tmp_path / "machine.py").write_text("2")
    assert commit_module.git_commit() == f"{commit}-changed"


def test_the_provenance_is_valid_json() -> None:
    found = machine.provenance(CPU)
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"device", "cores", "torch_threads", "versions", "commit"}
    assert found["cores"] >= 1
    assert found["device"]
