"""Helpers that run programs of the project in new processes."""

import os
import subprocess
import sys

from tests.conftest import ROOT


def run(*arguments: str, ranks: int = 1, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in the project's root, with one thread; with `ranks` above 1 under torchrun.

    timeout: seconds.
    """
    start = [sys.executable]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        [*start, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
