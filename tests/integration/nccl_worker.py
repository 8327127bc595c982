"""A rank of a job over NCCL: nccl_worker.py nccl|stand_in STRUCK_RANK ERROR. The struck rank raises, the others hang.

stand_in: gloo in place of NCCL, where there is no GPU. gloo notices a lost rank by itself and its clean-up waits for nobody, so
both are replaced by what NCCL does.
"""

import sys
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


def main() -> None:
    kind, struck, error = sys.argv[1:]
    ranks, wait = find_ranks(), hang_in_a_collective
    start_logging(None, ranks.rank)
    if kind == "stand_in":
        dist.init_process_group = init_by_gloo
        dist.destroy_process_group = wait = hang
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=ranks.rank)  # type: ignore[assignment,misc]
    else:
        torch.cuda.set_device(ranks.rank)
    device = torch.device("cuda", ranks.rank)
    with process_group(Config(), ranks, device, before_exit=lambda failure: print(f"before exit: {failure.message}")):
        if ranks.rank != int(struck):
            wait()
        raise ERRORS[error]("what went wrong")


try:
    main()
except InputError as error:  # as the command line does
    print(f"error: {error}")
    sys.exit(2)
