"""The state of the networks that no optimizer changes: a step whose update is skipped restores it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class UntrainedState:
    """All buffers and all parameters without gradient: BatchNorm's statistics, a target network, a queue.

    They become views of one flat tensor for each data type, so that restoring them is one operation on the device and the host
    does not need to know whether the update was skipped."""

    def __init__(self, networks: nn.Module) -> None:
        self._flat = list(_flatten(networks))
        self._before = [flat.clone() for flat in self._flat]

    def remember(self) -> None:
        """Remember the state. Call before forward."""
        for before, flat in zip(self._before, self._flat, strict=True):
            before.copy_(flat)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo what the block changes: with activation checkpointing, backward runs the forward again, which would update the
        statistics a second time."""
        after_forward = [flat.clone() for flat in self._flat]
        yield
        for flat, kept in zip(self._flat, after_forward, strict=True):
            flat.copy_(kept)

    def restore_if(self, skipped: Tensor) -> None:
        """Restore what was remembered where `skipped` (0-d bool, on the device)."""
        for flat, before in zip(self._flat, self._before, strict=True):
            flat.copy_(torch.where(skipped, before, flat))


def _flatten(networks: nn.Module) -> Iterator[Tensor]:
    """Make the untrained tensors views of one flat tensor for each data type, and yield these."""
    of_dtype: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
    for module in networks.modules():
        frozen = [(name, p) for name, p in module.named_parameters(recurse=False) if not p.requires_grad]
        for name, tensor in [*module.named_buffers(recurse=False), *frozen]:
            if name not in module._non_persistent_buffers_set:  # a constant
                of_dtype.setdefault(tensor.dtype, []).append((module, name, tensor))
    for found in of_dtype.values():
        flat = torch.cat([_in_memory_order(tensor.detach()) for _, _, tensor in found])
        offset = 0
        for module, name, tensor in found:
            view = flat.as_strided(tensor.shape, tensor.stride(), offset)
            if isinstance(tensor, nn.Parameter):
                tensor.data = view
            else:
                setattr(module, name, view)
            offset += tensor.numel()
        yield flat


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps, such as a channels_last one, as they lie in memory, 1-d."""
    return tensor.as_strided((tensor.numel(),), (1,))
