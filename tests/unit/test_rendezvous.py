"""Rendezvous: ranks connect to one store and compare their settings.

The ranks are threads here; tests/integration and tests/slurm have real ones.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from trainer.distributed import rendezvous
from trainer.distributed.ranks import Ranks
from trainer.distributed.rendezvous import compare_ranks, meet
from trainer.errors import InputError, TrainingFailedError

LONG = timedelta(seconds=20)
SHORT = timedelta(seconds=2)
NAMES = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_RESTART_COUNT",
         "SLURM_JOB_NODELIST", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all variables of launchers from the environment."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def job(environment: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the environment of a SLURM job on this node."""

    def set_job(job_id: str, nodes: str = "localhost") -> None:
        environment.setenv("SLURM_JOB_ID", job_id)
        environment.setenv("SLURM_STEP_ID", "0")
        environment.setenv("SLURM_STEP_NODELIST", nodes)

    return set_job


@pytest.fixture
def free_port(environment: pytest.MonkeyPatch) -> int:
    """Return a free port, after setting MASTER_ADDR and MASTER_PORT to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    environment.setenv("MASTER_PORT", str(port))
    return port


def on_ranks(count: int, work: Callable[[Ranks], Any]) -> list[Future[Any]]:
    """Run `work` for all ranks at once, and return when all have ended."""
    with ThreadPoolExecutor(count) as pool:
        return [pool.submit(work, Ranks(rank, count)) for rank in range(count)]


def test_tasks_of_srun_meet_without_an_address(job: Callable[..., None]) -> None:
    job("123")

    stores = [future.result() for future in on_ranks(3, lambda ranks: meet(ranks, LONG))]
    for rank, store in enumerate(stores):
        store.set(f"from {rank}", str(rank))
    assert [store.get("from 2") for store in stores] == [b"2"] * 3


def test_several_nodes_meet_at_the_address_of_the_first(job: Callable[..., None]) -> None:
    job("124", nodes="localhost,127.0.0.[1-2]")
    stores = on_ranks(2, lambda ranks: meet(ranks, LONG))
    assert stores[1].result().check(["job"])


def test_two_jobs_with_the_same_ports_do_not_join_each_other(
    job: Callable[..., None], environment: pytest.MonkeyPatch
) -> None:
    environment.setattr("zlib.crc32", lambda data: 4321)
    job("1")
    other = meet(Ranks(0, 2), LONG)
    job("2")
    stores = [f.result() for f in on_ranks(2, lambda ranks: meet(ranks, LONG))]
    stores[0].set("of", "job 2")
    assert stores[1].get("of") == b"job 2"
    assert not other.check(["of"])


def test_a_requeued_job_does_not_join_its_earlier_start(
    job: Callable[..., None], environment: pytest.MonkeyPatch
) -> None:
    job("7")
    earlier = meet(Ranks(0, 2), LONG)
    assert isinstance(earlier, dist.TCPStore)
    environment.setenv("MASTER_PORT", str(earlier.port))
    environment.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(InputError, match=r"rank 1: another job \(7\.0\.0\) listens on"):
        meet(Ranks(1, 2), LONG)


def test_an_unresolvable_node_name_is_reported(job: Callable[..., None], environment: pytest.MonkeyPatch) -> None:
    environment.setattr(rendezvous, "_RESOLVE_SECONDS", 0.1)
    job("9", nodes="no-such-node.invalid,b")
    with pytest.raises(InputError, match=r"cannot resolve no-such-node\.invalid, the node of rank 0"):
        meet(Ranks(1, 2), SHORT)


def test_several_ranks_need_an_address() -> None:
    with pytest.raises(
        InputError, match=r"2 ranks, but the environment lacks MASTER_ADDR and MASTER_PORT: start with `wmse launch`"
    ):
        meet(Ranks(0, 2), SHORT)


@pytest.mark.parametrize("port", ["http", "0", "70000", "-1"])
def test_an_invalid_port_is_refused(port: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    environment.setenv("MASTER_PORT", port)
    with pytest.raises(InputError, match=f"MASTER_PORT is '{port}'"):
        meet(Ranks(0, 2), SHORT)


@pytest.mark.slow
def test_a_port_in_use_is_named(free_port: int, environment: pytest.MonkeyPatch) -> None:
    environment.setattr(rendezvous, "_CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", free_port)):
        with pytest.raises(
            InputError, match=f"cannot listen on MASTER_ADDR 127.0.0.1, MASTER_PORT {free_port} .*in use"
        ):
            meet(Ranks(0, 2), SHORT)
        # this server accepts connections, but never answers
        with pytest.raises(
            InputError, match=f"rank 1: the program that listens on 127.0.0.1, port {free_port}, is not rank 0"
        ):
            meet(Ranks(1, 2), LONG)
    with pytest.raises(dist.DistError, match=f"rank 0 did not listen on 127.0.0.1, port {free_port}, within 2 s"):
        meet(Ranks(1, 2), SHORT)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_the_store_listens_on_one_address_only(address: str, free_port: int, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MASTER_ADDR", address)
    store = meet(Ranks(0, 2), LONG)
    listening = {
        c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == free_port
    }
    assert {a.ip for a in listening} <= {"127.0.0.1", "::1"}
    assert len(listening) == 1
    assert meet(Ranks(1, 2), LONG).check(["job"])
    del store


# --- comparison of ranks ---


def compare(
    count: int, facts: Callable[[Ranks], dict[str, Any]], first: Callable[[], None] = lambda: None
) -> list[str]:
    """Return the error of each rank, empty if it raises none."""

    stores = []  # keeps the store of rank 0 until all ranks have read it

    def work(ranks: Ranks) -> str:
        stores.append(store := meet(ranks, LONG))
        try:
            compare_ranks(store, ranks, facts(ranks), LONG, first)
        except (InputError, TrainingFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return [future.result() for future in on_ranks(count, work)]


def test_ranks_may_differ_in_the_path_of_the_data(free_port: int) -> None:
    order: list[str] = []
    raised = compare(
        3, lambda r: {"seed": 1, "data.root": f"/local/{r.rank}", "sides": (1, 2)}, lambda: order.append("first")
    )
    assert raised == ["", "", ""]
    assert order == ["first"]


def test_a_rank_with_other_settings_is_named_on_every_rank_at_once(free_port: int) -> None:
    began = time.monotonic()
    raised = compare(3, lambda r: {"seed": 1 + (r.rank == 2), "commit": "abc", "optimizer.learning_rate": 0.1})
    assert time.monotonic() - began < LONG.total_seconds()
    assert len(set(raised)) == 1
    assert "InputError: the ranks of this job do not belong together" in raised[0]
    assert f"rank 2 on {socket.gethostname()} has seed 2, rank 0 has 1" in raised[0]
    assert "learning_rate" not in raised[0]


def test_every_rank_reports_the_problem_of_one_rank(free_port: int) -> None:
    raised = compare(3, lambda r: {"problem": "no GPU here" if r.rank == 1 else ""})
    assert raised == [f"InputError: rank 1 on {socket.gethostname()}: no GPU here"] * 3
    assert all("no GPU here" in text for text in compare(2, lambda r: {"problem": "no GPU here"}))


def test_ranks_on_one_gpu_are_refused(free_port: int) -> None:
    raised = compare(3, lambda r: {"gpu": "GPU-a" if r.rank else "GPU-b"})
    assert all("ranks 1 and 2" in text and "both use GPU GPU-a: start one rank per GPU" in text for text in raised)


@pytest.mark.parametrize("kind", [InputError, TrainingFailedError])
def test_every_rank_raises_the_error_of_rank_0(kind: type[Exception], free_port: int) -> None:
    def refuse() -> None:
        raise kind("the folder is in use")

    assert compare(3, lambda r: {}, refuse) == [f"{kind.__name__}: the folder is in use"] * 3


def test_a_second_process_with_the_same_rank_is_refused(free_port: int) -> None:
    """This happens if two jobs that were started by hand share a port."""
    store = meet(Ranks(0, 3), LONG)

    def join(_: Ranks) -> str:
        try:
            compare_ranks(meet(Ranks(1, 3), SHORT), Ranks(1, 3), {}, SHORT, lambda: None)
        except InputError as error:
            return str(error)
        except dist.DistError:
            return "waited for rank 0"
        return ""

    outcomes = sorted(future.result() for future in on_ranks(2, join))
    assert "rank 1: another process has already joined as this rank" in outcomes[0]
    assert outcomes[1] == "waited for rank 0"
    del store


def test_a_missing_rank_is_named(free_port: int, environment: pytest.MonkeyPatch) -> None:
    environment.setattr(rendezvous, "_SAY_SECONDS", 0.5)

    def work(ranks: Ranks) -> None:
        if ranks.rank < 2:
            compare_ranks(meet(ranks, SHORT), ranks, {}, SHORT, lambda: None)

    first, second, _ = on_ranks(3, work)
    with pytest.raises(dist.DistError, match="rank 2 did not join within 2 s"):
        first.result()
    assert second.exception() is not None


@pytest.mark.slow
def test_the_wait_for_all_ranks_together_respects_the_time_out(free_port: int) -> None:
    """Rank 1 joins when most of the time is over, and rank 2 never: rank 0 does not start a new wait."""

    def join(ranks: Ranks) -> None:
        if ranks.rank == 1:
            time.sleep(3.5)
        compare_ranks(meet(ranks, LONG), ranks, {}, timedelta(seconds=4), lambda: None)

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        first, _ = [pool.submit(join, Ranks(rank, 3)) for rank in (0, 1)]
        with pytest.raises(dist.DistStoreError, match="rank 2 did not join"):
            first.result()
        assert time.monotonic() - began < 7.0  # twice the time-out would be 7.5
