"""Main function of a rank of a job over NCCL, or over a stand-in for NCCL on a machine without GPUs.

The stand-in is gloo. Unlike NCCL, gloo detects a lost rank, and its clean-up does not wait for other ranks. The stand-in
therefore hangs in both cases, as NCCL does.
"""

import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from trainer.config.schema import Config
from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import find_ranks
from trainer.errors import InputError
from trainer.run.folder import start_logging

ERRORS = {"InputError": InputError, "RuntimeError": RuntimeError}
plain_init = dist.init_process_group


def hang(*_: Any) -> None:
    threading.Event().wait()


def hang_in_a_collective() -> None:
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def init_by_gloo(backend: str, *, device_id: Any, **options: Any) -> None:
    assert backend == "nccl"
    plain_init("gloo", **options)


def main(kind: str, failing_rank: int, error: str) -> int:
    """Raise on the failing rank, and hang on the others as if they waited for a lost rank. Return the exit code."""
    try:
        _run(kind, failing_rank, error)
    except InputError as input_error:  # as the command line does
        print(f"error: {input_error}")
        return 2
    return 0


def _run(kind: str, failing_rank: int, error: str) -> None:
    ranks = find_ranks()
    wait = hang_in_a_collective
    start_logging(None, ranks.rank)
    if kind == "stand_in":
        dist.init_process_group = init_by_gloo
        dist.destroy_process_group = wait = hang
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=ranks.rank)  # type: ignore[assignment,misc]
    else:
        torch.cuda.set_device(ranks.rank)
    device = torch.device("cuda", ranks.rank)
    with process_group(
        Config(), ranks, device, before_exit=lambda failure: print(f"before exit: {failure.message}", flush=True)
    ):
        if ranks.rank != failing_rank:
            wait()
        raise ERRORS[error]("what went wrong")
