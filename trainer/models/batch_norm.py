"""BatchNorm with statistics of each view separately, or of the rows of all ranks.

torch's SyncBatchNorm does not run on CPUs, breaks compiled graphs, and can't separate views. This one consists of plain tensor
operations, and one functional collective in each direction.

Shapes: x (d*N, C, ...) view-major; statistics (d, C), or (1, C) where all views are taken together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


class ViewBatchNorm(nn.Module):
    """A BatchNorm that takes over the parameters, buffers and options of another one, with the same names in state_dict()."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm, num_views: int, group_name: str | None, world_size: int) -> None:
        """num_views: number of parts of the batch that have statistics of their own; 1: all rows together.

        group_name: process group over which statistics are taken, with the same number of rows on all ranks; None: this rank.
        """
        super().__init__()
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.eps, self.momentum = norm.eps, norm.momentum or 0.0
        self.num_views = num_views
        self.group_name = group_name
        self.world_size = world_size
        self.training = norm.training
        self.after = nn.Sequential(*(getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        elif self.group_name is None:
            y = (
                torch.cat([self._own_rows(part) for part in x.chunk(self.num_views)])
                if self.num_views > 1
                else self._own_rows(x)
            )
        else:
            y = self._all_ranks(x, self.group_name)
        return self.after(y)

    def _own_rows(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
        )

    def _all_ranks(self, x: Tensor, group_name: str) -> Tensor:
        views = at_least_float32(x).unflatten(0, (self.num_views, -1))  # (d, N, C, ...)
        over = [1, *range(3, views.dim())]
        local_var, local_mean = torch.var_mean(views, over, correction=0)  # (d, C)
        mean, var = _OverRanks.apply(local_mean, local_var, group_name, self.world_size)
        count = views[0, :, 0].numel() * self.world_size
        self._track(mean.detach(), var.detach() * (count / (count - 1)))
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        # one scale and shift for each row: a residual block adds in place to the output, and if the output were a view,
        # that would cost copies in backward
        scale, shift = (self._by_row(each, views) for each in (scale, shift))
        return torch.addcmul(shift, views.flatten(0, 1), scale).to(x.dtype)

    def _by_row(self, values: Tensor, views: Tensor) -> Tensor:
        """(d, C) -> (d*N, C, 1, ...); (1, C, 1, ...) where all views share them."""
        if self.num_views > 1:
            values = values.repeat_interleave(views.shape[1], 0)
        return values[(...,) + (None,) * (views.dim() - 3)]

    def _track(self, mean: Tensor, var: Tensor) -> None:
        for view in range(self.num_views):
            self.running_mean.lerp_(mean[view], self.momentum)
            self.running_var.lerp_(var[view], self.momentum)


def at_least_float32(x: Tensor) -> Tensor:
    """Return float64 unchanged, since tests compare in it, and everything else as float32."""
    return x if x.dtype == torch.float64 else x.float()


class _OverRanks(torch.autograd.Function):
    """Turn the mean and variance (d, C) of each rank's rows into those of all rows. All ranks hold the same number of rows.

    Forward and backward send 2 d C numbers each, for any number of ranks. Forward sends float64, because the variance is the
    difference between the mean of squares and the square of the mean.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, group_name: Any, world_size: int) -> tuple[Tensor, Tensor]:
        own = mean.double()
        sums = torch.stack([own, var.double() + own.square()])
        all_mean, mean_square = funcol.all_reduce(sums, "sum", group_name).div(world_size).unbind()
        ctx.save_for_backward((own - all_mean).to(mean.dtype))
        ctx.group_name, ctx.world_size = group_name, world_size
        all_var = (mean_square - all_mean.square()).clamp_min(0)
        return all_mean.to(mean.dtype), all_var.to(var.dtype)

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Sum gradients over ranks, since every rank's output depends on this rank's input."""
        (own_less_all,) = ctx.saved_tensors
        owed = funcol.all_reduce(torch.stack([grad_mean, grad_var]), "sum", ctx.group_name)
        owed_mean, owed_var = owed.div(ctx.world_size).unbind()
        return owed_mean + 2 * own_less_all * owed_var, owed_var, None, None


def convert_batch_norm(module: nn.Module, num_views: int, group_name: str | None, world_size: int) -> nn.Module:
    """Replace every BatchNorm inside `module` by a ViewBatchNorm, unless the plain one does the same."""
    if num_views == 1 and group_name is None:
        return module
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            setattr(module, name, ViewBatchNorm(child, num_views, group_name, world_size))
        else:
            convert_batch_norm(child, num_views, group_name, world_size)
    return module


def stop_counting_batches(model: nn.Module) -> None:
    """Remove the number of batches from every BatchNorm. With a fixed momentum nothing reads it, and updating each costs a
    GPU one launch in every step."""
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and norm.momentum is not None:
            norm.num_batches_tracked = None
