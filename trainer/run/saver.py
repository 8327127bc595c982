"""Checkpoints written beside the training: the loop stands still for a copy, a thread does the rest."""

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
_STUCK_SECONDS = 60.0  # between two warnings that a save hangs
_log = logging.getLogger(__name__)


class Saver:
    """Writes one checkpoint at a time in a thread of its own; it keeps one copy of a checkpoint in host memory.

    A save that fails for want of room, rights or a folder (OSError) is logged, and told by `failure` once and by `wait`: the
    caller decides. Anything else that goes wrong in the thread is a fault of ours and raised by the method called next."""

    def __init__(self, folder: Path, keep_last: int, kept_steps: Container[int] = ()) -> None:
        """folder, keep_last, kept_steps: as `save_checkpoint` takes them."""
        self._folder = folder
        self._keep_last = keep_last
        self._kept_steps = kept_steps
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._untold: OSError | None = None
        self._last: OSError | None = None
        self._fault: BaseException | None = None
        self.failed_in_a_row = 0

    def save(self, content: dict[str, Any]) -> None:
        """Start to write `content` (as `save_checkpoint` takes it) as it is now; its tensors may change afterwards.

        On a GPU the copies are queued behind what was launched on the current stream, and the host waits for nothing but the
        save before this one. Raises TypeError for content that is neither tensors nor plain values."""
        waited = self._join()
        if waited > _SLOW_SECONDS:
            _log.warning("training waited %.1f s for the previous checkpoint to be written to %s", waited, self._folder)
        content, copied = self._copy.take(content)
        self._thread = threading.Thread(target=self._write, args=(content, copied), name="checkpoint")
        self._thread.start()

    def under_way(self) -> bool:
        """Whether a save is being written."""
        thread = self._thread  # which the loop sets to None, while another thread asks
        return thread is not None and thread.is_alive()

    def failure(self) -> OSError | None:
        """The last failure not told yet, None where there is none; does not wait."""
        self._raise_fault()
        with self._lock:
            error, self._untold = self._untold, None
        return error

    def wait(self) -> None:
        """Until what was given last is on the disk. Raises the OSError where it can't be, whether told before or not."""
        self._join()
        self.failure()
        if self._last is not None:
            raise self._last

    def close(self) -> None:
        """Wait for the thread. A failed save was logged and is not raised again here, where another error may be under way."""
        self._join()

    def _join(self) -> float:
        """Wait for the thread -> seconds it took."""
        began = time.perf_counter()
        while self._thread is not None:
            self._thread.join(_STUCK_SECONDS)
            if self._thread.is_alive():
                _log.warning("still waiting for a checkpoint to be written to %s", self._folder)
            else:
                self._thread = None
        self._raise_fault()
        return time.perf_counter() - began

    def _raise_fault(self) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def _write(self, content: dict[str, Any], copied: list[torch.cuda.Event]) -> None:
        """The thread's work."""
        began = time.perf_counter()
        try:
            for event in copied:
                event.synchronize()
            path = save_checkpoint(self._folder, content, self._keep_last, self._kept_steps)
            self.failed_in_a_row, self._last = 0, None
            _log.info("saved %s (%.1f s)", path, time.perf_counter() - began)
        except OSError as error:
            self.failed_in_a_row += 1
            with self._lock:
                self._untold = self._last = error
            error.filename = error.filename or str(checkpoint_path(self._folder, content["step"]))
            _log.error(
                "the checkpoint of step %d was NOT saved: %s; %d save(s) in a row failed; %s",
                content["step"],
                describe_os_error(error, tensor_bytes(content)),
                self.failed_in_a_row,
                _what_is_left(self._folder),
            )
        except BaseException as fault:
            self._fault = fault


def tensor_bytes(content: dict[str, Any]) -> int:
    """About what a checkpoint takes on the disk."""
    sizes: list[int] = []

    def count(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    map_tensors(content, count)
    return sum(sizes)


def _what_is_left(folder: Path) -> str:
    try:
        good = list_checkpoints(folder)
    except OSError:
        return "the folder can't be read either"
    return f"a restart continues from {good[-1][1].name}" if good else "there is no checkpoint to continue from"


class HostCopy:
    """Copies of nested tensors in host memory, each with storage of its own (BatchNorm's statistics share one). The memory is
    kept and used again: a copy of 229 MB takes 0.13 s, into new pages 0.55 s; and making pinned ones stops the device."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], Tensor] = {}

    def take(self, content: dict[str, Any]) -> tuple[dict[str, Any], list[torch.cuda.Event]]:
        """The copy, valid until the next one is taken, and what to wait for before it is read: an event for each GPU."""
        memory: dict[tuple[Any, ...], Tensor] = {}
        devices: set[torch.device] = set()

        def copy(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
            memory[path] = self._room(path, tensor)
            if tensor.is_cuda:
                devices.add(tensor.device)
            return memory[path].copy_(tensor.detach(), non_blocking=True)

        copied = map_tensors(content, copy)
        self._memory = memory
        return copied, [_event(device) for device in devices]

    def _room(self, path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        """Host memory for a tensor, pinned where it comes from a GPU: a copy to pageable memory would wait."""
        room = self._memory.get(path)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
        return room


def _event(device: torch.device) -> torch.cuda.Event:
    """After what is queued on the device's current stream; the thread that waits for it sleeps, and takes no core."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
