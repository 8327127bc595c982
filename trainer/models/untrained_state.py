"""State of the networks that no optimizer changes. A step restores it if its update is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class UntrainedState:
    """All buffers and all parameters without gradient: statistics of BatchNorm, a target network, a queue.

    The remembered state is one flat tensor for each data type. Restoring it takes a few operations on the device for any
    number of tensors, and the host does not need to know whether the update was skipped."""

    def __init__(self, networks: nn.Module) -> None:
        # Only tensors of one data type can be joined in a flat tensor.
        of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in _untrained(networks):
            of_dtype.setdefault(tensor.dtype, []).append(_in_memory_order(tensor))
        self._groups = list(of_dtype.values())
        # Activation checkpointing of timm's backbones.
        self._recomputes = any(getattr(module, "grad_checkpointing", False) for module in networks.modules())
        self._before: list[Tensor] = []
        self.remember()

    def remember(self) -> None:
        """Remember the state. The step calls this before forward."""
        self._before = [torch.cat(group) for group in self._groups]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo changes that a backward makes to the state.

        With activation checkpointing, backward runs the forward again, which would update the statistics a second time."""
        # Without it a backward changes no state, so no copy is needed.
        if not self._recomputes:
            yield
            return
        after_forward = [torch.cat(group) for group in self._groups]
        yield
        for group, kept in zip(self._groups, after_forward, strict=True):
            _copy(kept, group)

    def restore_if(self, skipped: Tensor) -> None:
        """Restore the remembered state if `skipped` (0-d bool, on the device)."""
        # On a CPU, reading the flag makes nothing wait. Elsewhere the device chooses between the two states.
        if skipped.device.type == "cpu" and not skipped:
            return
        for group, before in zip(self._groups, self._before, strict=True):
            now = torch.cat(group)
            _copy(torch.where(skipped, before, now), group)


def _untrained(networks: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that a checkpoint holds, and the parameters without gradient."""
    for module in networks.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # buffers outside checkpoints are constants
                yield buffer
    yield from (parameter.data for parameter in networks.parameters() if not parameter.requires_grad)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a 1-d view of a tensor in the order of memory, which suits channels_last. The tensor has no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _copy(flat: Tensor, group: list[Tensor]) -> None:
    """Copy consecutive parts of a flat tensor to the tensors of a group."""
    sizes = [len(tensor) for tensor in group]
    torch._foreach_copy_(group, flat.split(sizes))
