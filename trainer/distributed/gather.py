"""Embeddings of all ranks of a loss group, and sums over them, with gradients.

The first two functions differ in the backward. Use `gather_rows` if every rank computes the loss of all rows, and
`gather_candidates` if each rank computes the loss of its local rows. `sum_of_group` serves losses of moments, such as
covariances, for which no rank needs the rows of another.

Shapes: d views, N images of this rank, R ranks in the group, k embedding size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.errors import InputError

# torch 2.14 renamed these functions.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather_rows(v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
    """Join the rows of all ranks of a loss group, so that each view holds the ranks' images in the order of the ranks.

    v: (d*N, k), view-major; N must be the same on every rank. group: the loss group; None is all ranks. Returns (d*N*R, k),
    view-major.

    The backward gives a rank the gradient of its local rows times R, without communication. This is exact if every rank
    of the group computes the same loss from the joined rows, and DDP then takes the mean over all ranks. With G groups
    of R ranks this mean is 1/(G R) sum_g sum_r J_r^T (R dloss_g/dv_r) = 1/G sum_g dloss_g/dw, where J_r is the
    derivative of rank r's rows with respect to the weights w. That is the gradient of the mean of the groups' losses. A
    backward that also summed over ranks would add R equal copies of it.
    """
    _check(v, num_views)
    return _GatherRows.apply(v, num_views, group)


def gather_candidates(v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
    """Join the rows of all ranks as `gather_rows` does, for a loss that each rank computes for its local rows only.

    The backward sums the gradients of all ranks' losses with respect to a rank's rows (one reduce-scatter). With DDP's mean
    over ranks this is exact: it gives the gradient of (1/R) sum_r loss_r, where loss_r is the mean over rank r's rows."""
    _check(v, num_views)
    return _GatherCandidates.apply(v, num_views, group)


def sum_of_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum a tensor over the ranks of a loss group; None is this rank alone.

    The backward multiplies the gradient by the number of ranks, without communication. As for `gather_rows`, this is exact
    under DDP's mean if every rank of the group computes the same from the sum. It is not if a rank combines the sum with
    its local rows, such as a mean that is subtracted from them: then each rank has another gradient."""
    return x if group is None else _SumOfGroup.apply(x, group)


def join_rows(v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
    """Join the rows of all ranks as `gather_rows` does, without a gradient."""
    _check(v, num_views)
    return _join(v.detach(), num_views, group)


def _check(v: Tensor, num_views: int) -> None:
    if v.dim() != 2 or v.shape[0] % num_views:
        raise InputError(
            f"embeddings have the shape {tuple(v.shape)}: for {num_views} views give (num_views * images, embedding_size)"
        )


def _join(v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
    """Gather (d*N, k) of each rank into (d*N*R, k), view-major."""
    ranks = dist.get_world_size(group)
    rows, k = v.shape
    by_rank = v.new_empty(ranks, num_views, rows // num_views, k)
    _all_gather(by_rank.view(-1, k), v.contiguous(), group=group)
    by_view = by_rank.transpose(0, 1)  # (d, R, N, k)
    return by_view.reshape(-1, k)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.num_views = num_views
        ctx.ranks = dist.get_world_size(group)
        ctx.rank = dist.get_rank(group)
        return _join(v, num_views, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        k = gradient.shape[1]
        by_rank = gradient.view(ctx.num_views, ctx.ranks, -1, k)  # (d, R, N, k)
        local = by_rank[:, ctx.rank] * ctx.ranks
        return local.flatten(0, 1), None, None


class _GatherCandidates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.num_views = num_views
        ctx.group = group
        return _join(v, num_views, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks = dist.get_world_size(ctx.group)
        rows, k = gradient.shape
        by_rank = gradient.view(ctx.num_views, ranks, -1, k).transpose(0, 1)  # (R, d, N, k)
        local = gradient.new_empty(rows // ranks, k)
        _reduce_scatter(local, by_rank.reshape(-1, k), group=ctx.group)
        return local, None, None


class _SumOfGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = dist.get_world_size(group)
        # The all-reduce works in place, but must not change its input.
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank has the same gradient, and DDP divides by the number of ranks.
        return gradient * ctx.ranks, None
