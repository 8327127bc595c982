"""How the ranks of a job meet: one store on the node of rank 0, and a comparison of what must be the same before they train.

torchrun brings its own store. Otherwise rank 0 opens one at MASTER_ADDR and MASTER_PORT if these are set; under srun they need
not be: the address is the first node's, and the port is the first free one of a few that follow from the job's id.
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
_STRANGE_ANSWERS = 3  # rank 0 may be slow to answer when hundreds of ranks come at once
_RESOLVE_SECONDS = 15.0
_MOST_PROBLEMS = 20  # lines of a message
_SAY_SECONDS = 30.0  # a wait for other ranks is logged this often
# settings that may differ between ranks: where a node keeps its copy of the data, and how many threads read it
_MAY_DIFFER = ("host", "gpu", "data.root", "data.threads")


def meet(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """The store of all ranks of this job, opened by rank 0.

    Raises InputError if MASTER_ADDR and MASTER_PORT are needed and not set, if rank 0 can't listen there, or if another job
    does; torch's DistError if rank 0 does not come within `timeout`.
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
    """Host and ports at which the ranks may meet."""
    env = os.environ
    host = env.get("MASTER_ADDR", "")
    port = env.get("MASTER_PORT", "")
    job = job_key()
    if job:
        nodes = expand_nodes(env.get("SLURM_STEP_NODELIST", "")) if "WMSE_LAUNCH" not in env else []
        host = host or (nodes[0] if len(nodes) > 1 else "127.0.0.1")
        first = zlib.crc32(job.encode())
        ports = [_FIRST_PORT + (first + 997 * i) % _PORT_RANGE for i in range(_NUM_PORTS)]
    else:
        ports = []
    if port:
        if not (port.isdecimal() and 0 < int(port) < 65_536):
            raise InputError(f"MASTER_PORT is {port!r}: give a free port of rank 0's node, 1024 to 65535")
        ports = [int(port)]
    if not host or not ports:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        raise InputError(
            f"{ranks.world_size} ranks, but {' and '.join(missing)} not set: start with `wmse launch`, torchrun or srun, or "
            "set them"
        )
    return host, ports


def _listen(host: str, ports: list[int], ranks: Ranks, timeout: timedelta) -> dist.TCPStore:
    """Open the store at the first free port.

    It listens on MASTER_ADDR alone if that is given, and on this node alone if there is no other. Between nodes it listens on
    every address: which one the others reach is theirs to find out, since a node's own name often leads to 127.0.1.1 there.
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
        # torch takes the descriptor over; "wait_for_workers" would block before a stranger can be told apart
        return dist.TCPStore(
            address, port, ranks.world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    where = f"MASTER_ADDR {host}, MASTER_PORT {', '.join(map(str, ports))}"
    raise InputError(
        f"rank 0 can't listen on {where} ({reason}): set MASTER_ADDR to an address of rank 0's node, and MASTER_PORT to a "
        "free port"
    )


def _listen_on(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=_BACKLOG)


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _connect(host: str, ports: list[int], job: str, ranks: Ranks, timeout: timedelta) -> dist.TCPStore:
    """Try the ports in turn until one answers with this job's key."""
    end = time.monotonic() + timeout.total_seconds()
    say_at = time.monotonic() + _SAY_SECONDS
    strange = dict.fromkeys(ports, 0)  # how often something there did not answer as a store does
    _resolve(host)
    while True:
        for port in [port for port in ports if strange[port] < _STRANGE_ANSWERS]:
            try:
                found = _ask(host, port, ranks.world_size)
            except TimeoutError:
                strange[port] += 1
                continue
            if found and found[1] == job:
                found[0].set_timeout(timeout)
                return found[0]
            if found and len(ports) == 1:
                raise InputError(
                    f"rank {ranks.rank}: another job ({found[1] or 'started by hand'}) listens on MASTER_ADDR {host}, "
                    f"MASTER_PORT {port}: give each job on a node its own MASTER_PORT"
                )
        if min(strange.values()) >= _STRANGE_ANSWERS:
            raise InputError(
                f"rank {ranks.rank}: what listens on {host}, port {', '.join(map(str, ports))}, is not rank 0 of this job: set "
                "MASTER_PORT to a free port"
            )
        if time.monotonic() >= end:
            raise dist.DistNetworkError(
                f"rank 0 did not come to {host}, port {ports[0]}, within {timeout.total_seconds():.0f} s"
            )
        if time.monotonic() >= say_at:
            say_at += _SAY_SECONDS
            _log.warning("still waiting for rank 0 at %s, port %d", host, ports[0])
        time.sleep(0.2)


def _resolve(host: str) -> None:
    """Raises InputError if the name of rank 0's node leads nowhere, as seen from this node."""
    end = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise InputError(
                    f"{socket.gethostname()} can't resolve {host}, the node of rank 0 ({error}): set MASTER_ADDR to a name or "
                    "address that all nodes can reach"
                ) from error
        time.sleep(1.0)


def _ask(host: str, port: int, world_size: int) -> tuple[dist.TCPStore, str] | None:
    """The store at a port and the key of its job; None if there is none yet. Raises TimeoutError if something else listens."""
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()  # torch would retry for its whole time-out
    except OSError:
        return None
    found: list[tuple[dist.TCPStore, str]] = []

    def open_store() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):  # rank 0 is still opening it, or has just gone
            store = dist.TCPStore(host, port, world_size, False, timedelta(seconds=_CONNECT_SECONDS))
            store.wait([_JOB_KEY], timedelta(seconds=_CONNECT_SECONDS))
            found.append((store, store.get(_JOB_KEY).decode()))

    # torch waits for ever for a program that accepts the connection and then says nothing
    thread = threading.Thread(target=open_store, daemon=True)
    thread.start()
    thread.join(3 * _CONNECT_SECONDS)
    if thread.is_alive():
        raise TimeoutError
    return found[0] if found else None


def compare_ranks(
    store: dist.Store, ranks: Ranks, facts: Mapping[str, Any], timeout: timedelta, first: Callable[[], None]
) -> None:
    """Make sure that all ranks have the same facts, before any of them trains.

    facts: plain values by name, such as settings and the commit. Every rank writes its own; rank 0 compares, calls `first`,
    and writes what became of it. If ranks differ, or `first` raises InputError or TrainingFailedError, all ranks raise it.
    """
    end = time.monotonic() + timeout.total_seconds()
    own = json.dumps({"host": socket.gethostname(), "world_size": ranks.world_size, **facts}, default=str)
    if store.add(f"arrived/{ranks.rank}", 1) > 1:
        raise InputError(
            f"rank {ranks.rank}: another process has already joined as this rank. Start every rank once, and "
            "give two jobs on one node a MASTER_PORT each"
        )
    store.set(f"rank/{ranks.rank}", own)
    if not ranks.is_first:
        verdict = json.loads(_wait(store, _VERDICT_KEY, end, "rank 0"))
        if verdict["code"]:
            store.add(_READERS_KEY, 1)
            raise (InputError if verdict["code"] == BAD_INPUT else TrainingFailedError)(verdict["message"])
        return
    try:
        _check_same([json.loads(_wait(store, f"rank/{r}", end, f"rank {r}")) for r in range(ranks.world_size)])
        first()
    except (InputError, TrainingFailedError) as error:
        code = BAD_INPUT if isinstance(error, InputError) else FAILED
        store.set(_VERDICT_KEY, json.dumps({"code": code, "message": str(error)}))
        _wait_until_read(store, ranks)
        raise
    store.set(_VERDICT_KEY, json.dumps({"code": 0}))


def _wait(store: dist.Store, key: str, end: float, whom: str) -> bytes:
    """The value of a key that another rank writes. Raises DistError, naming the rank, if it does not come by `end`."""
    began = time.monotonic()
    while (left := end - time.monotonic()) > 0:
        try:
            store.wait([key], timedelta(seconds=min(left, _SAY_SECONDS)))
            return store.get(key)
        except dist.DistStoreError:  # a time-out; a broken connection is another error
            _log.warning("still waiting for %s", whom)
    raise dist.DistStoreError(f"{whom} did not come within {time.monotonic() - began:.0f} s")


def _wait_until_read(store: dist.Store, ranks: Ranks) -> None:
    """Keep rank 0's store alive until the other ranks know why they end, for some seconds at most."""
    end = time.monotonic() + _READ_SECONDS
    while store.add(_READERS_KEY, 0) < ranks.world_size - 1 and time.monotonic() < end:
        time.sleep(0.05)


def _check_same(all_facts: list[dict[str, Any]]) -> None:
    """Raises InputError naming each rank and fact that differs from rank 0's."""
    own = all_facts[0]
    broken = [
        f"rank {r} on {facts['host']}: {facts['problem']}" for r, facts in enumerate(all_facts) if facts.get("problem")
    ]
    if broken:
        raise InputError("\n".join(broken[:_MOST_PROBLEMS]))
    problems: list[str] = []
    for rank, facts in enumerate(all_facts):
        for name in sorted(own.keys() | facts.keys()):
            may_differ = name in _MAY_DIFFER
            if facts.get(name) != own.get(name) and not may_differ:
                problems.append(
                    f"rank {rank} on {facts['host']} has {name} {facts.get(name)!r}, rank 0 has {own.get(name)!r}"
                )
    problems += _shared_devices(all_facts)
    if problems:
        listed = "\n".join(f"  - {line}" for line in problems[:_MOST_PROBLEMS])
        raise InputError(f"the ranks of this job do not belong together:\n{listed}\nStart all of them by one command")


def _shared_devices(all_facts: Iterable[dict[str, Any]]) -> list[str]:
    """Two ranks on one GPU would wait for each other, or fail in NCCL with a message that names neither."""
    problems = []
    taken: dict[tuple[str, str], int] = {}
    for rank, facts in enumerate(all_facts):
        device = facts.get("gpu")
        if device and (earlier := taken.setdefault((facts["host"], device), rank)) != rank:
            problems.append(
                f"ranks {earlier} and {rank} on {facts['host']} both use GPU {device}: start one rank per GPU"
            )
    return problems
