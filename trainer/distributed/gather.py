"""Join the embeddings of a loss group's ranks, with gradients.

Two backwards: `gather_rows` if every rank computes the loss of all rows, `gather_candidates` if each computes that of its own.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.errors import InputError

# renamed in torch 2.14
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather_rows(v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
    """Join the rows of all ranks of a loss group, so that each view holds the ranks' images in group-rank order.

    v: (num_views * N, k), view-major, N images of this rank, the same N on every rank -> (num_views * N * ranks, k),
    view-major. group: the loss group; None is all ranks. v may not be larger on one rank than on another.

    The backward hands a rank the gradient of its own rows times the number of ranks in the group, without any
    communication. That is exact when every rank of the group computes the same loss from the joined rows and DDP then
    takes the mean over all ranks. With G groups of R ranks that mean is 1/(G R) sum_g sum_r J_r^T (R dloss_g/dv_r) =
    1/G sum_g dloss_g/dw, J_r being the derivative of rank r's rows with respect to the weights w: the gradient of the
    mean of the groups' losses. A backward that also summed over ranks would add R equal copies of it.
    """
    _check(v, num_views)
    return _GatherRows.apply(v, num_views, group)


def gather_candidates(v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
    """Join the rows of all ranks as `gather_rows` does, for a loss that each rank computes for its own rows.

    The backward adds up the gradients of all ranks' losses at a rank's rows (one reduce-scatter). With DDP's mean over ranks
    that is exact: the gradient of (1/R) sum_r loss_r, where loss_r is the mean over rank r's rows."""
    _check(v, num_views)
    return _GatherCandidates.apply(v, num_views, group)


def _check(v: Tensor, num_views: int) -> None:
    if v.dim() != 2 or v.shape[0] % num_views:
        raise InputError(f"give (num_views * images, embedding) rows for {num_views} views, not {tuple(v.shape)}")


def _join(v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
    """(d*N, k) of each rank -> (d*N*ranks, k), view-major."""
    ranks = dist.get_world_size(group)
    by_rank = v.new_empty(ranks, num_views, v.shape[0] // num_views, v.shape[1])
    _all_gather(by_rank.view(-1, v.shape[1]), v.contiguous(), group=group)
    return by_rank.transpose(0, 1).reshape(-1, v.shape[1])


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
        by_rank = gradient.view(ctx.num_views, ctx.ranks, -1, gradient.shape[1])
        return (by_rank[:, ctx.rank] * ctx.ranks).flatten(0, 1), None, None


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
        by_rank = gradient.view(ctx.num_views, ranks, -1, gradient.shape[1]).transpose(0, 1)  # (ranks, d, N, k)
        own = gradient.new_empty(by_rank.shape[1:].numel() // gradient.shape[1], gradient.shape[1])
        _reduce_scatter(own, by_rank.reshape(-1, gradient.shape[1]), group=ctx.group)
        return own, None, None
