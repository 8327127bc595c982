"""Starts programs of the project in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def run(*words: str, ranks: int = 1, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, or the same under torchrun with so many ranks; from the project's root, one thread each."""
    start = [sys.executable]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        [*start, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def wmse(*words: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """The command line."""
    return run("-m", "trainer", *map(str, words), ranks=ranks)
