"""BatchNorm with separate statistics for each view or for groups of rows, or with the statistics of all ranks.

torch's SyncBatchNorm does not run on CPUs, breaks compiled graphs, and cannot separate views. This module consists of plain
tensor operations, and one functional collective in each direction.

Shapes: x (p*N, C, ...) in p parts with separate statistics (p, C). The parts are the views, groups of rows, or (p = 1) all
views together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.precision import at_least_float32


class ViewBatchNorm(nn.Module):
    """BatchNorm that takes over parameters, buffers and options of another one, with the same names in state_dict()."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, norm: _BatchNorm, num_views: int, group_name: str | None, world_size: int, rows: int = 0
    ) -> None:
        """num_views: number of parts of the batch with separate statistics; 1: all rows together.

        group_name: process group over which statistics are taken; all ranks hold the same number of rows. None: this rank.
        rows: number of consecutive rows with separate statistics, instead of num_views parts. 0: num_views parts.
        """
        super().__init__()
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.eps = norm.eps
        self.momentum = norm.momentum or 0.0
        self.num_views = num_views
        self.rows = rows
        self.group_name = group_name
        self.world_size = world_size
        self.training = norm.training
        # timm's BatchNorm may include dropout and an activation.
        extras = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
        self.after = nn.Sequential(*extras)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (p*N, C, ...); in evaluation mode with the running statistics."""
        if not self.training:
            y = self._batch_norm(x)
        elif self.group_name is None:
            num_parts = len(x) // self.rows if self.rows else self.num_views
            y = self._this_rank(x, num_parts)
        else:
            y = self._all_ranks(x, self.group_name)
        return self.after(y)

    def _this_rank(self, x: Tensor, num_parts: int) -> Tensor:
        """Normalise x with the statistics of this rank, each part separately."""
        if num_parts == 1:
            return self._batch_norm(x)
        return torch.cat([self._batch_norm(part) for part in x.chunk(num_parts)])

    def _batch_norm(self, x: Tensor) -> Tensor:
        """Apply torch's BatchNorm. In training it also updates the running statistics."""
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )

    def _all_ranks(self, x: Tensor, group_name: str) -> Tensor:
        """Normalise x with the statistics of all ranks."""
        # Join the mean and variance of this rank's rows with those of the other ranks.
        views = at_least_float32(x).unflatten(0, (self.num_views, -1))  # (d, N, C, ...)
        dims = [1, *range(3, views.dim())]
        local_var, local_mean = torch.var_mean(views, dims, correction=0)  # (d, C)
        mean, var = over_ranks(local_mean, local_var, group_name, self.world_size)

        # The running variance is the unbiased one.
        count = views[0, :, 0].numel() * self.world_size
        unbiased_var = var.detach() * (count / (count - 1))
        self._update_running(mean.detach(), unbiased_var)

        # Apply mean, variance, weight and bias as one scale and one shift.
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        # A residual block adds in place to the output. If the output were a view, that would cost copies in backward, so
        # scale and shift are expanded to one for each row.
        scale = self._by_row(scale, views)
        shift = self._by_row(shift, views)
        y = torch.addcmul(shift, views.flatten(0, 1), scale)
        return y.to(x.dtype)

    def _by_row(self, values: Tensor, views: Tensor) -> Tensor:
        """Expand (d, C) to (d*N, C, 1, ...), or (1, C) to (1, C, 1, ...)."""
        if self.num_views > 1:
            values = values.repeat_interleave(views.shape[1], 0)
        return values[(...,) + (None,) * (views.dim() - 3)]

    def _update_running(self, mean: Tensor, var: Tensor) -> None:
        """Follow mean and unbiased variance (d, C) of each part in turn."""
        for part_mean, part_var in zip(mean, var, strict=True):
            self.running_mean.lerp_(part_mean, self.momentum)
            self.running_var.lerp_(part_var, self.momentum)


def over_ranks(mean: Tensor, var: Tensor, group_name: str, world_size: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance (d, C) over the rows of all ranks, from those of each rank, with their gradients."""
    return _OverRanks.apply(mean, var, group_name, world_size)


class _OverRanks(torch.autograd.Function):
    """Joins the means and variances (d, C) of all ranks, each of the same number of rows.

    Forward and backward send 2 d C numbers each, for any number of ranks. Forward sends float64, because the variance is the
    difference between the mean of squares and the square of the mean.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, group_name: Any, world_size: int) -> tuple[Tensor, Tensor]:
        """Return mean and variance (d, C) over the rows of all ranks."""
        # Average the mean and the mean square, whose difference gives the variance.
        local_mean = mean.double()
        local_mean_square = var.double() + local_mean.square()
        moments = torch.stack([local_mean, local_mean_square])
        sums = funcol.all_reduce(moments, "sum", group_name)
        all_mean, mean_square = sums.div(world_size).unbind()
        deviation = local_mean - all_mean
        ctx.save_for_backward(deviation.to(mean.dtype))
        ctx.group_name = group_name
        ctx.world_size = world_size
        all_var = (mean_square - all_mean.square()).clamp_min(0)
        return all_mean.to(mean.dtype), all_var.to(var.dtype)

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Sum the gradients over ranks, because the output of every rank depends on the input of this rank."""
        (deviation,) = ctx.saved_tensors
        gradients = torch.stack([grad_mean, grad_var])
        sums = funcol.all_reduce(gradients, "sum", ctx.group_name)
        all_grad_mean, all_grad_var = sums.div(ctx.world_size).unbind()
        # The variance over all ranks also depends on this rank's mean, by its deviation from the joint mean.
        local_grad_mean = all_grad_mean + 2 * deviation * all_grad_var
        return local_grad_mean, all_grad_var, None, None


def convert_batch_norm(
    module: nn.Module,
    num_views: int,
    group_name: str | None,
    world_size: int,
    rows: int = 0,
    *,
    kind: type[ViewBatchNorm] = ViewBatchNorm,
) -> nn.Module:
    """Replace every BatchNorm inside `module` by one of `kind`. Keep a plain one that computes the same as a ViewBatchNorm."""
    if kind is ViewBatchNorm and num_views == 1 and group_name is None and rows == 0:
        return module
    # Replace each one in place; the new one takes over its weights.
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            setattr(module, name, kind(child, num_views, group_name, world_size, rows))
        else:
            convert_batch_norm(child, num_views, group_name, world_size, rows, kind=kind)
    return module


def encode_one_view_at_a_time(networks: nn.Module) -> None:
    """Let `encode_views` pass the views one by one through every encoder whose BatchNorm separates them.

    The result is the same. On a CPU the activations of one view, unlike those of all views, may fit into the cache: a step of
    4 views of 128 images of CIFAR-10 takes 0.85 of the time."""
    for module in networks.modules():
        encoder: Any = getattr(module, "encoder", None)
        if encoder is None:
            continue
        for norm in encoder.modules():
            if isinstance(norm, ViewBatchNorm) and norm.num_views > 1 and not norm.rows:
                encoder.views_apart = norm.num_views
                norm.num_views = 1


def encode_views(encoder: Any, images: Tensor) -> Tensor:
    """Encode images (R, ...) as features (R, F), one view at a time after `encode_one_view_at_a_time`."""
    parts = getattr(encoder, "views_apart", 1)
    if parts == 1:
        return encoder(images)
    return torch.cat([encoder(view) for view in images.chunk(parts)])


def stop_counting_batches(model: nn.Module) -> None:
    """Remove the counter of batches from every BatchNorm.

    With a fixed momentum nothing reads it, and each update of it costs a kernel launch in every step."""
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and norm.momentum is not None:
            norm.num_batches_tracked = None
