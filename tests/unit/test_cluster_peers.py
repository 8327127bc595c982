"""Failure reports between ranks, over a real store, with ranks as threads of this process."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.processes import free_port, wait_until
from trainer.distributed import peers as module
from trainer.distributed.peers import Failure, LostRankError, Peers
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError, TrainingFailedError

# the fixture `ends` raises in a thread
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Return a TCP store; shorten the waits of `Peers`."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.2)
    return dist.TCPStore("127.0.0.1", free_port(), None, True, timedelta(seconds=20), wait_for_workers=False)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of exit codes with which threads would have ended the process."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit  # ends the thread only

    monkeypatch.setattr(os, "_exit", end)
    return codes


def of_rank(store: dist.Store, rank: int, world_size: int = 2) -> Peers:
    return Peers(store, Ranks(rank, world_size))


def test_the_first_failure_ends_the_other_ranks_with_its_exit_code(store: dist.Store, ends: list[int]) -> None:
    first, second, third = (of_rank(store, rank, 3) for rank in range(3))
    told: list[Failure] = []
    with second.watched(lambda failure: None), first.watched(told.append):
        second.tell(InputError("no folder /x"))
        third.tell(RuntimeError("later"))
        wait_until(lambda: bool(ends), seconds=10)
    assert ends == [2]
    assert told[0].exit_code == 2
    assert told[0].message.startswith("rank 1 on ")
    assert told[0].message.endswith("failed: no folder /x")


def test_a_rank_that_ends_in_time_is_not_ended_by_its_thread(store: dist.Store, ends: list[int]) -> None:
    first, second = of_rank(store, 0), of_rank(store, 1)
    with first.watched(lambda failure: None):
        second.tell(RuntimeError("gone"))
        wait_until(lambda: first.heard is not None, seconds=10)
    time.sleep(0.4)
    assert ends == []
    cause = first.cause_of(dist.DistStoreError("Connection closed"))
    assert isinstance(cause, LostRankError)
    assert str(cause).endswith("failed: RuntimeError: gone")
    assert cause.exit_code == 1


def test_the_end_waits_for_a_checkpoint_in_progress(store: dist.Store, ends: list[int]) -> None:
    first, second = of_rank(store, 0), of_rank(store, 1)
    saving = threading.Event()
    saving.set()
    first.is_saving = saving.is_set
    with first.watched(lambda failure: None):
        second.tell(RuntimeError("gone"))
        time.sleep(1.0)
        assert ends == []
        saving.clear()
        wait_until(lambda: ends == [1], seconds=10)


def test_rank_0_keeps_the_store_until_every_other_rank_has_read_it(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of rank 0, or a rank that looks twice, does not count as another rank."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 5.0)
    module._LOOK_SECONDS = 1.0
    ranks = [of_rank(store, rank, 3) for rank in range(3)]
    ranks[0].tell(RuntimeError("gone"))
    of_rank(store, 0, 3).look()
    ranks[1].look()
    of_rank(store, 1, 3).look()
    began = time.monotonic()
    threading.Timer(0.5, ranks[2].look).start()
    ranks[0].wait_until_heard()
    assert 0.4 < time.monotonic() - began < 1.5


def test_an_error_caused_by_another_rank_is_not_reported(store: dist.Store) -> None:
    first, second = of_rank(store, 0), of_rank(store, 1)
    second.tell(dist.DistStoreError("timed out"))
    first.look()
    assert first.heard is None
    second.tell(TrainingFailedError("21 steps in a row failed"))
    first.look()
    assert first.heard is not None
    assert first.heard.message.endswith("failed: 21 steps in a row failed")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_check_raises_on_every_rank_or_on_none(failing: int, store: dist.Store) -> None:
    raised: list[tuple[int, str]] = []
    ranks = [of_rank(store.clone(), rank) for rank in range(2)]

    def work(rank: int) -> None:
        ranks[rank].check(None)  # all is well
        try:
            ranks[rank].check(FileNotFoundError(2, "No such file", "/x") if rank == failing else None)
        except InputError as error:
            raised.append((rank, str(error)))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(rank for rank, _ in raised) == [0, 1]
    assert all(text.startswith(f"rank {failing} on ") and "/x: No such file" in text for _, text in raised)


def test_a_single_rank_reports_nothing() -> None:
    alone = Peers()
    alone.tell(RuntimeError("x"))
    alone.wait_until_heard()
    alone.look()
    assert alone.heard is None
    with alone.watched(lambda failure: None):
        alone.check(None)
    with pytest.raises(FileNotFoundError):
        alone.check(FileNotFoundError(2, "No such file", "/x"))


def test_rank_0_does_not_wait_for_ranks_that_failed_themselves(store: dist.Store) -> None:
    first, second = of_rank(store, 0), of_rank(store, 1)
    for peers in (first, second):
        peers.tell(RuntimeError("the same on both"))
    began = time.monotonic()
    first.wait_until_heard()
    assert time.monotonic() - began < 0.15  # the limit is 0.2


def test_an_error_that_all_ranks_know_is_not_reported_again(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [of_rank(store.clone(), rank) for rank in range(2)]  # a wait holds up a shared connection

    def check(peers: Peers, error: InputError | None) -> None:
        with pytest.raises(InputError, match="no folder"):
            peers.check(error)
        peers.tell(InputError("the verdict"))

    threads = [
        threading.Thread(target=check, args=(ranks[0], None)),
        threading.Thread(target=check, args=(ranks[1], InputError("no folder /x"))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert "tells the other ranks" not in caplog.text
    assert not store.check(["failure"])


def test_the_main_thread_can_ask_for_a_failure(store: dist.Store) -> None:
    first, second = of_rank(store, 0), of_rank(store, 1)
    assert first.ask() is None
    with first.watched(lambda failure: None):
        second.tell(InputError("no folder /x"))
        failure = first.ask()
    assert failure is not None
    assert failure.exit_code == 2
