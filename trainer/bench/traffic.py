"""Counts the operators that a piece of code runs, and the bytes that they read and write: from shapes, not from a clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
OVERWRITERS = {"aten::fill_", "aten::zero_", "aten::copy_"}  # what they change they do not read
FILLERS = {
    "aten::ones_like",
    "aten::zeros_like",
    "aten::full_like",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::new_full",
}
ROW_READERS = {"aten::index", "aten::index_select", "aten::gather"}  # read of their first argument what they return
INDEX_PUTS = {"aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}  # (target, indices, values, accumulate)
SCATTERS = {"aten::scatter_", "aten::index_copy_"}  # (target, dim, index, values)
ADDING_SCATTERS = {"aten::scatter_add_", "aten::index_add_"}


class Traffic(TorchDispatchMode):
    """`with Traffic() as traffic:` counts what runs inside, backward included -> traffic.operators, traffic.bytes.

    An operator is what torch hands to the device's code after taking composite ones apart: views and bare allocations are
    no operators. A custom operator is opened: what runs inside it counts, not itself, unless something that cannot be seen
    (a Triton kernel) wrote one of its results: then it counts too, as one operator that reads its arguments and writes its
    results once each, however many kernels it has.
    A Triton kernel outside a custom operator is not seen.

    Bytes: every tensor argument is read once and every result written once; an expanded tensor counts its own elements;
    an operator in place reads and writes what it changes, `fill_`, `zero_`, `copy_` only write it; gathering and
    scattering by indices touch the chosen rows only. What an operator copies inside itself (LAPACK's column order, a
    reduction's partial sums) is not counted, and no cache is assumed.

    While such a mode is on, autograd takes forms out of place where it else works in place: the same operators and bytes
    but for `index_put` with accumulation, which is therefore counted as `index_put_`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.bytes = 0
        self._written: dict[int, torch.UntypedStorage] | None = None  # inside a custom operator: what was seen written

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # inside a custom operator composite ones arrive whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func.namespace == "aten":
            result, counted = func(*args, **kwargs), False
        else:
            result, counted = self._open(func, args, kwargs)
        if not counted and _works(func, args, kwargs, result):
            self.operators += 1
            self.bytes += operator_bytes(func, args, kwargs, result)
            if self._written is not None:
                self._written.update(_storages(_written(func, args, kwargs, result)))
        return result

    def _open(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Run a custom operator -> its result, and whether operators that were counted inside wrote all of it."""
        devices = {tensor.device.type for tensor in _tensors((args, kwargs))}
        key = torch._C.DispatchKey.CUDA if "cuda" in devices else torch._C.DispatchKey.CPU
        around, self._written = self._written, {}
        with self:  # straight to the device's code: through the front door it would come back here
            result = func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        seen, self._written = self._written, around
        if around is not None:
            around.update(seen)
        results = [tensor for tensor in _written(func, args, kwargs, result) if tensor.numel()]
        return result, all(address in seen for address in _storages(results))


def operator_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that one operator reads and writes, by the rules of `Traffic`."""
    name, given = func._schema.name, _by_argument(func, args, kwargs)
    arguments = [tensor for _, values in given for tensor in values]
    if name in FILLERS:  # their argument lends its shape and type only
        return _bytes([result])
    if name in ROW_READERS:
        chosen = _bytes([result])
        return chosen + _bytes(arguments[1:]) + chosen
    if name in INDEX_PUTS:
        return _index_put_bytes(name, *args)
    if name in SCATTERS | ADDING_SCATTERS:
        values = args[3] if isinstance(args[3], Tensor) else args[2]  # a number fills as many places as the index has
        passes = 2 if name in ADDING_SCATTERS else 1
        return _bytes(arguments[1:]) + passes * values.numel() * args[0].element_size()
    reads = [tensor for argument, values in given if not _is_unread(name, argument) for tensor in values]
    return _bytes(reads) + _bytes(_written(func, args, kwargs, result))


def _index_put_bytes(name: str, target: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *_: Any) -> int:
    given = [index for index in indices if index is not None]
    assert all(index.dtype != torch.bool for index in given), "how many elements a mask chooses only the device knows"
    places = torch.broadcast_shapes(*(index.shape for index in given)).numel()
    whole = [index is None for index in indices] + [True] * (target.dim() - len(indices))
    row = torch.Size([size for size, kept in zip(target.shape, whole, strict=True) if kept]).numel()
    written = places * row * target.element_size()
    copied = 2 * _bytes([target]) if name == "aten::index_put" and not accumulate else 0
    return _bytes([*given, values]) + copied + (2 if accumulate else 1) * written


def _works(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """False for an allocation, and where nothing is changed and every result lies in memory that was handed in."""
    if func._schema.name in ALLOCATIONS:
        return False
    results = _tensors(result)
    if func._schema.is_mutable or not results:
        return True
    given = _storages(_tensors((args, kwargs)))
    return not all(address in given for address in _storages(results))


def _by_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, list[Tensor]]]:
    """-> (argument of the schema, tensors given for it)."""
    named = {argument.name: argument for argument in func._schema.arguments}
    positional = zip(func._schema.arguments, args, strict=False)
    pairs = [*positional, *((named[name], value) for name, value in kwargs.items())]
    return [(argument, _tensors(value)) for argument, value in pairs]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Tensor]:
    given = _by_argument(func, args, kwargs)
    return [tensor for argument, values in given if _is_written(argument) for tensor in values] or _tensors(result)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """-> {address: storage}; holding the storage keeps its address from being given to another."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_unread(name: str, argument: Any) -> bool:
    return argument.is_out or (name in OVERWRITERS and _is_written(argument))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Memory that the tensors address: a dimension of stride 0 repeats the same elements."""
    total = 0
    for tensor in tensors:
        sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
        total += torch.Size(sizes).numel() * tensor.element_size() if tensor.numel() else 0
    return total
