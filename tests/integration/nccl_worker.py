"""A rank of a job over what looks like NCCL: nccl_worker.py STRUCK_RANK ERROR. The struck rank raises, the others hang.

gloo notices a lost rank by itself and its clean-up waits for nobody, so both are replaced by what NCCL does.
"""

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from trainer.cluster.ranks import find_ranks
from trainer.config import Config
from trainer.distributed import process_group
from trainer.errors import InputError
from trainer.run_folder import start_logging


def stand_for_ever(*_: Any) -> None:
    threading.Event().wait()


def init_by_gloo(backend: str, *, device_id: Any, **options: Any) -> None:
    assert backend == "nccl"
    plain_init("gloo", **options)


plain_init, dist.init_process_group = dist.init_process_group, init_by_gloo
dist.destroy_process_group = stand_for_ever
ranks = find_ranks()
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=ranks.rank)  # type: ignore[assignment,misc]


def main() -> None:
    start_logging(None, ranks.rank)
    struck, kind = sys.argv[1:]
    config = replace(Config(), timeout_minutes=10.0)
    device = torch.device("cuda", 0)
    with process_group(config, ranks, device, before_exit=lambda failure: print(f"before exit: {failure.message}")):
        if ranks.rank != int(struck):
            stand_for_ever()
        raise {"InputError": InputError, "RuntimeError": RuntimeError}[kind]("what went wrong")


try:
    main()
except InputError as error:  # as the command line does
    print(f"error: {error}")
    sys.exit(2)
