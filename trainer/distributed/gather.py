"""Embeddings of a slice group: the ranks that whiten their rows together see each other's rows, gradients included."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.errors import InputError

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.14


def gather_rows(v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
    """Join the rows of all ranks of a slice group, so that each view holds the ranks' images in group-rank order.

    v: (num_views * N, k), view-major, N images of this rank, the same N on every rank -> (num_views * N * ranks, k),
    view-major. group: the slice group; None is all ranks. v may not be larger on one rank than on another.

    The backward hands a rank the gradient of its own rows times the number of ranks in the group, without any
    communication. That is exact when every rank of the group computes the same loss from the joined rows and DDP then
    takes the mean over all ranks. With G groups of R ranks that mean is 1/(G R) sum_g sum_r J_r^T (R dloss_g/dv_r) =
    1/G sum_g dloss_g/dw, J_r being the derivative of rank r's rows with respect to the weights w: the gradient of the
    mean of the groups' losses. A backward that also summed over ranks would add R equal copies of it.
    """
    if v.dim() != 2 or v.shape[0] % num_views:
        raise InputError(
            f"gather_rows wants (num_views * images, embedding) rows for {num_views} views, got {tuple(v.shape)}"
        )
    return _GatherRows.apply(v, num_views, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, num_views: int, group: dist.ProcessGroup | None) -> Tensor:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        ctx.num_views, ctx.ranks, ctx.rank = num_views, ranks, rank
        by_rank = v.new_empty(ranks, num_views, v.shape[0] // num_views, v.shape[1])
        _all_gather(by_rank.view(-1, v.shape[1]), v.contiguous(), group=group)
        return by_rank.transpose(0, 1).reshape(-1, v.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        by_rank = gradient.view(ctx.num_views, ctx.ranks, -1, gradient.shape[1])
        return (by_rank[:, ctx.rank] * ctx.ranks).flatten(0, 1), None, None
