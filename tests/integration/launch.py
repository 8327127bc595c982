"""Starts programs of the project in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.faults import free_port


def run(*words: str, ranks: int = 1, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, or the same under torchrun with so many ranks; from the project's root, one thread each."""
    start = [sys.executable]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        [*start, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def start_ranks(worker: str, ranks: int, *words: str) -> list[subprocess.Popen[str]]:
    """Start a program once a rank, as a scheduler does: only environment variables tell the ranks apart."""
    job = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    env = os.environ | job | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return [
        subprocess.Popen(
            [sys.executable, worker, *words],
            cwd=ROOT,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def wmse(*words: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """The command line."""
    return run("-m", "trainer", *map(str, words), ranks=ranks)
