"""Rendezvous: the ranks of a job meet in a key-value store on the node of rank 0, and compare facts before they train.

torchrun provides a store. Otherwise rank 0 opens one at MASTER_ADDR and MASTER_PORT. srun does not set these: the
address then is the first node's, and the port is the first free one of a few ports derived from the job's id.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainer.cluster.nodes import expand_nodes
from trainer.distributed.ranks import Ranks, job_key
from trainer.errors import BAD_INPUT, FAILED, InputError, TrainingFailedError

_log = logging.getLogger(__name__)
_FIRST_PORT = 12_000  # below Linux's range for outgoing connections, which begins at 32,768
_PORT_RANGE = 20_000
_NUM_PORTS = 8
_JOB_KEY = "job"
_VERDICT_KEY = "verdict"
_READERS_KEY = "readers"
_READ_SECONDS = 5.0
_BACKLOG = 1024
_CONNECT_SECONDS = 2.0
_STRANGE_ANSWERS = 3  # rank 0 may answer late when hundreds of ranks connect at once
_RESOLVE_SECONDS = 15.0
_MOST_PROBLEMS = 20  # lines of a message
_SAY_SECONDS = 30.0  # interval of the log lines while a rank waits for others
# These may differ between ranks: a node may keep its copy of the data elsewhere, and read it with more threads.
_MAY_DIFFER = ("host", "gpu", "data.root", "data.threads")


def meet(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """Return the store of all ranks of this job. Rank 0 opens it, the other ranks connect to it.

    Raises InputError if MASTER_ADDR or MASTER_PORT is needed and not set, if rank 0 cannot listen at that address, or if
    another job listens there. Raises torch's DistError if rank 0 does not open the store within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), ranks.world_size, False, timeout)
        return dist.PrefixStore(f"wmse/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    host, ports = _address(ranks)
    job = job_key()
    if ranks.is_first:
        store = _listen(host, ports, ranks, timeout)
        store.set(_JOB_KEY, job)
        return store
    return _connect(host, ports, job, ranks, timeout)


def _address(ranks: Ranks) -> tuple[str, list[int]]:
    """Return the host and the possible ports of rank 0's store."""
    env = os.environ
    host = env.get("MASTER_ADDR", "")
    port = env.get("MASTER_PORT", "")
    ports = []
    # Derive host and ports from the job: every rank computes the same ones, and another job most likely others.
    job = job_key()
    if job:
        nodes = [] if "WMSE_LAUNCH" in env else expand_nodes(env.get("SLURM_STEP_NODELIST", ""))
        first_node = nodes[0] if len(nodes) > 1 else "127.0.0.1"
        host = host or first_node
        start = zlib.crc32(job.encode())
        ports = [_FIRST_PORT + (start + 997 * i) % _PORT_RANGE for i in range(_NUM_PORTS)]
    if port:
        if not (port.isdecimal() and 0 < int(port) < 65_536):
            raise InputError(f"MASTER_PORT is {port!r}: give a free port of rank 0's node, 1024 to 65535")
        ports = [int(port)]
    if not host or not ports:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        raise InputError(
            f"the job has {ranks.world_size} ranks, but the environment lacks {' and '.join(missing)}: start with `wmse "
            "launch`, torchrun or srun, or set these variables"
        )
    return host, ports


def _listen(host: str, ports: list[int], ranks: Ranks, timeout: timedelta) -> dist.TCPStore:
    """Open the store at the first free port.

    It listens on MASTER_ADDR only if this is set, and on the loopback address if the job has one node. Otherwise it
    listens on every address: on the node itself, its name often resolves to 127.0.1.1, which the other nodes cannot reach.
    """
    named = bool(os.environ.get("MASTER_ADDR")) or host == "127.0.0.1"
    reason: Exception | None = None
    for port in ports:
        try:
            listener = _listen_on(host, port) if named else _listen_everywhere(port)
        except OSError as error:
            reason = error
            continue
        address = host if named else "127.0.0.1"
        # torch takes over the descriptor. wait_for_workers would count any process that connects, even one of another job.
        return dist.TCPStore(
            address, port, ranks.world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    listed = ", ".join(map(str, ports))
    raise InputError(
        f"rank 0 cannot listen on MASTER_ADDR {host}, MASTER_PORT {listed} ({reason}): set MASTER_ADDR to an address of rank "
        "0's node, and MASTER_PORT to a free port"
    )


def _listen_on(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=_BACKLOG)


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _connect(host: str, ports: list[int], job: str, ranks: Ranks, timeout: timedelta) -> dist.TCPStore:
    """Try the ports in turn until a store with this job's key answers."""
    end = time.monotonic() + timeout.total_seconds()
    say_at = time.monotonic() + _SAY_SECONDS
    strange = dict.fromkeys(ports, 0)  # answers from each port that were not those of a store
    _resolve(host)
    while True:
        for port in ports:
            if strange[port] >= _STRANGE_ANSWERS:
                continue
            try:
                found = _ask(host, port, ranks.world_size)
            except TimeoutError:
                strange[port] += 1
                continue
            if not found:
                continue
            store, other_job = found
            if other_job == job:
                store.set_timeout(timeout)
                return store
            # A port from MASTER_PORT is the only one. Else another job may hold one of the derived ports: try the next.
            if len(ports) == 1:
                raise InputError(
                    f"rank {ranks.rank}: another job ({other_job or 'started by hand'}) listens on MASTER_ADDR {host}, "
                    f"MASTER_PORT {port}: give each job on a node a different MASTER_PORT"
                )
        if min(strange.values()) >= _STRANGE_ANSWERS:
            listed = ", ".join(map(str, ports))
            raise InputError(
                f"rank {ranks.rank}: the program that listens on {host}, port {listed}, is not rank 0 of this job: set "
                "MASTER_PORT to a free port"
            )
        if time.monotonic() >= end:
            raise dist.DistNetworkError(
                f"rank 0 did not listen on {host}, port {ports[0]}, within {timeout.total_seconds():.0f} s"
            )
        if time.monotonic() >= say_at:
            say_at += _SAY_SECONDS
            _log.warning("still waiting for rank 0 at %s, port %d", host, ports[0])
        time.sleep(0.2)


def _resolve(host: str) -> None:
    """Raise InputError if this node cannot resolve the name of rank 0's node."""
    end = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise InputError(
                    f"{socket.gethostname()} cannot resolve {host}, the node of rank 0 ({error}): set MASTER_ADDR to a name or "
                    "address that all nodes can reach"
                ) from error
        time.sleep(1.0)


def _ask(host: str, port: int, world_size: int) -> tuple[dist.TCPStore, str] | None:
    """Return the store at a port and the key of its job; None if nothing listens yet.

    Raises TimeoutError if another kind of program listens."""
    # Try a plain connection first: torch would retry for its whole time-out.
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError:
        return None
    found: list[tuple[dist.TCPStore, str]] = []
    timeout = timedelta(seconds=_CONNECT_SECONDS)

    def open_store() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):  # rank 0 is still opening the store, or has just ended
            store = dist.TCPStore(host, port, world_size, False, timeout)
            store.wait([_JOB_KEY], timeout)
            key = store.get(_JOB_KEY).decode()
            found.append((store, key))

    # A thread, because torch waits for ever for a program that accepts the connection and never answers.
    thread = threading.Thread(target=open_store, daemon=True)
    thread.start()
    thread.join(3 * _CONNECT_SECONDS)
    if thread.is_alive():
        raise TimeoutError
    return found[0] if found else None


def compare_ranks(
    store: dist.Store, ranks: Ranks, facts: Mapping[str, Any], timeout: timedelta, first: Callable[[], None]
) -> None:
    """Make sure that all ranks have the same facts before any of them trains.

    facts: plain values by name, such as settings and the commit. Every rank writes its facts to the store. Rank 0
    compares them, calls `first` and writes the verdict. If ranks differ, or if `first` raises InputError or
    TrainingFailedError, all ranks raise the same error.
    """
    end = time.monotonic() + timeout.total_seconds()
    host_facts = {"host": socket.gethostname(), "world_size": ranks.world_size}
    written = json.dumps({**host_facts, **facts}, default=str)
    # A second process of the same rank would overwrite the facts of the first.
    if store.add(f"arrived/{ranks.rank}", 1) > 1:
        raise InputError(
            f"rank {ranks.rank}: another process has already joined as this rank. Start every rank once, and "
            "give two jobs on one node different MASTER_PORTs"
        )
    store.set(f"rank/{ranks.rank}", written)
    if not ranks.is_first:
        # Other ranks only wait for the verdict.
        verdict = json.loads(_wait(store, _VERDICT_KEY, end, "rank 0"))
        if verdict["code"]:
            store.add(_READERS_KEY, 1)
            error_class = InputError if verdict["code"] == BAD_INPUT else TrainingFailedError
            raise error_class(verdict["message"])
        return
    try:
        # The verdict of rank 0 ends all ranks, also if one of them never arrives.
        all_facts = []
        for rank in range(ranks.world_size):
            text = _wait(store, f"rank/{rank}", end, f"rank {rank}")
            all_facts.append(json.loads(text))
        _check_same(all_facts)
        first()
    except (InputError, TrainingFailedError) as error:
        code = BAD_INPUT if isinstance(error, InputError) else FAILED
        store.set(_VERDICT_KEY, json.dumps({"code": code, "message": str(error)}))
        _wait_until_read(store, ranks)
        raise
    store.set(_VERDICT_KEY, json.dumps({"code": 0}))


def _wait(store: dist.Store, key: str, end: float, whom: str) -> bytes:
    """Return the value of a key that another rank writes.

    Raises DistError naming this rank if the key is missing at `end`."""
    began = time.monotonic()
    while (left := end - time.monotonic()) > 0:
        try:
            store.wait([key], timedelta(seconds=min(left, _SAY_SECONDS)))
            return store.get(key)
        except dist.DistStoreError:  # a time-out; a broken connection raises another error
            _log.warning("still waiting for %s", whom)
    raise dist.DistStoreError(f"{whom} did not join within {time.monotonic() - began:.0f} s")


def _wait_until_read(store: dist.Store, ranks: Ranks) -> None:
    """Give the other ranks some seconds to read the verdict, because the store ends with rank 0."""
    end = time.monotonic() + _READ_SECONDS
    while store.add(_READERS_KEY, 0) < ranks.world_size - 1 and time.monotonic() < end:
        time.sleep(0.05)


def _check_same(all_facts: list[dict[str, Any]]) -> None:
    """Raise InputError naming each rank and fact that differs from rank 0's. all_facts: one dict for each rank."""
    # The problem of a single rank comes first: its facts may differ because of it.
    failed = [
        f"rank {rank} on {facts['host']}: {facts['problem']}"
        for rank, facts in enumerate(all_facts)
        if facts.get("problem")
    ]
    if failed:
        raise InputError("\n".join(failed[:_MOST_PROBLEMS]))
    expected = all_facts[0]
    problems: list[str] = []
    for rank, facts in enumerate(all_facts):
        for name in sorted(expected.keys() | facts.keys()):
            value = facts.get(name)
            if name not in _MAY_DIFFER and value != expected.get(name):
                problems.append(
                    f"rank {rank} on {facts['host']} has {name} {value!r}, rank 0 has {expected.get(name)!r}"
                )
    problems += _shared_gpus(all_facts)
    if problems:
        listed = "\n".join(f"  - {line}" for line in problems[:_MOST_PROBLEMS])
        raise InputError(f"the ranks of this job do not belong together:\n{listed}\nStart all of them with one command")


def _shared_gpus(all_facts: Iterable[dict[str, Any]]) -> list[str]:
    """Describe GPUs that two ranks use.

    They would wait for each other, or fail in NCCL with a message that names neither."""
    problems = []
    rank_of_gpu: dict[tuple[str, str], int] = {}
    for rank, facts in enumerate(all_facts):
        gpu = facts.get("gpu")
        if not gpu:
            continue
        earlier = rank_of_gpu.setdefault((facts["host"], gpu), rank)
        if earlier != rank:
            problems.append(f"ranks {earlier} and {rank} on {facts['host']} both use GPU {gpu}: start one rank per GPU")
    return problems
