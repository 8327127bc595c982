"""Asynchronous checkpoint writer: training waits for a copy to host memory, and a thread writes the copy to the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.files import describe_os_error
from trainer.run.checkpoint import map_tensors, save_checkpoint
from trainer.run.checkpoint_files import checkpoint_path, list_checkpoints

_SLOW_SECONDS = 1.0  # a longer wait for the previous save is logged
_STUCK_SECONDS = 60.0  # interval of the warnings while a save hangs
_log = logging.getLogger(__name__)


class Saver:
    """Writer of one checkpoint at a time, in a separate thread. Keeps one copy of a checkpoint in host memory.

    A save that fails because the disk is full, read-only or gone (OSError) is logged. `failure` returns the error once
    and `wait` raises it, so that the caller decides what follows. Any other exception in the thread is a bug, and the
    next call raises it."""

    def __init__(self, folder: Path, keep_last: int, kept_steps: Container[int] = ()) -> None:
        """folder, keep_last, kept_steps: as `save_checkpoint` takes them."""
        self._folder = folder
        self._keep_last = keep_last
        self._kept_steps = kept_steps
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._unreported: OSError | None = None  # for `failure`
        self._last_error: OSError | None = None  # error of the newest save, for `wait`
        self._bug: BaseException | None = None
        self.failed_in_a_row = 0

    def save(self, content: dict[str, Any]) -> None:
        """Start to write `content` (see `save_checkpoint`) as it is now. Its tensors may change afterwards.

        On a GPU the copies are queued on the current stream, and the host only waits for the previous save. Raises
        TypeError if the content holds anything but tensors and plain values."""
        # The memory of the host copy is free only after the previous save.
        waited = self._join()
        if waited > _SLOW_SECONDS:
            _log.warning("training waited %.1f s for the previous checkpoint to be written to %s", waited, self._folder)
        content, copied = self._copy.take(content)
        self._thread = threading.Thread(target=self._write, args=(content, copied), name="checkpoint")
        self._thread.start()

    def under_way(self) -> bool:
        """Return whether a save is in progress."""
        thread = self._thread  # read once: the loop may set it to None while another thread asks
        return thread is not None and thread.is_alive()

    def failure(self) -> OSError | None:
        """Return the newest error that was not returned before; None if there is none. Does not wait."""
        self._raise_bug()
        with self._lock:
            error = self._unreported
            self._unreported = None
        return error

    def wait(self) -> None:
        """Wait until the newest checkpoint is on the disk.

        Raises its OSError, even if `failure` has returned it already."""
        self._join()
        self.failure()
        if self._last_error is not None:
            raise self._last_error

    def close(self) -> None:
        """Wait for the thread.

        Does not raise the error of a failed save: it was logged, and could hide another exception."""
        self._join()

    def _join(self) -> float:
        """Wait for the thread. Returns the seconds that it took."""
        began = time.perf_counter()
        while self._thread is not None:
            self._thread.join(_STUCK_SECONDS)
            if self._thread.is_alive():
                _log.warning("still waiting for a checkpoint to be written to %s", self._folder)
            else:
                self._thread = None
        self._raise_bug()
        return time.perf_counter() - began

    def _raise_bug(self) -> None:
        bug = self._bug
        if bug is not None:
            self._bug = None
            raise bug

    def _write(self, content: dict[str, Any], copied: list[torch.cuda.Event]) -> None:
        """Write the checkpoint once the GPUs have copied its tensors. Runs in the thread."""
        began = time.perf_counter()
        try:
            for event in copied:
                event.synchronize()
            path = save_checkpoint(self._folder, content, self._keep_last, self._kept_steps)
            seconds = time.perf_counter() - began
            self.failed_in_a_row = 0
            self._last_error = None
            _log.info("saved %s (%.1f s)", path, seconds)
        except OSError as error:
            self.failed_in_a_row += 1
            with self._lock:
                self._unreported = error
                self._last_error = error
            # An error without a name does not tell the user which disk is full.
            error.filename = error.filename or str(checkpoint_path(self._folder, content["step"]))
            _log.error(
                "the checkpoint of step %d was NOT saved: %s; %d save(s) in a row failed; %s",
                content["step"],
                describe_os_error(error, tensor_bytes(content)),
                self.failed_in_a_row,
                _restart_point(self._folder),
            )
        except BaseException as bug:
            self._bug = bug


def tensor_bytes(content: dict[str, Any]) -> int:
    """Return the total size of all tensors in bytes, which is about the size of the file."""
    sizes: list[int] = []

    # `map_tensors` visits every tensor; the copy that it builds is not used.
    def count(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    map_tensors(content, count)
    return sum(sizes)


def _restart_point(folder: Path) -> str:
    """Say which checkpoint a restart continues from."""
    try:
        found = list_checkpoints(folder)
    except OSError:
        return "the folder cannot be read either"
    if not found:
        return "the run has no checkpoint to continue from"
    _, newest = found[-1]
    return f"a restart continues from {newest.name}"


class HostCopy:
    """Copy of nested tensors in host memory, each in a separate storage (BatchNorm's statistics share one on the device).

    The memory is reused. A copy of 229 MB takes 0.13 s, or 0.55 s into newly allocated pages, and the allocation of pinned
    memory stalls the device."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], Tensor] = {}

    def take(self, content: dict[str, Any]) -> tuple[dict[str, Any], list[torch.cuda.Event]]:
        """Copy the tensors of `content`. Returns the copy and one event for each GPU: wait for them before reading the copy.

        The copy is valid until the next call."""
        # Memory of tensors that no longer exist is freed, because only the memory of this call is kept.
        memory: dict[tuple[Any, ...], Tensor] = {}
        devices: set[torch.device] = set()

        def copy(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
            memory[path] = self._host_tensor(path, tensor)
            if tensor.is_cuda:
                devices.add(tensor.device)
            return memory[path].copy_(tensor.detach(), non_blocking=True)

        copied = map_tensors(content, copy)
        self._memory = memory
        return copied, [_event(device) for device in devices]

    def _host_tensor(self, path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        """Return host memory for a tensor. It is pinned for a GPU's tensor: a copy to pageable memory would block."""
        host = self._memory.get(path)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = torch.empty_like(
                tensor,
                device="cpu",
                requires_grad=False,
                pin_memory=tensor.is_cuda,
            )
        return host


def _event(device: torch.device) -> torch.cuda.Event:
    """Record an event on the device's current stream. A thread that waits for it sleeps instead of using a core."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
