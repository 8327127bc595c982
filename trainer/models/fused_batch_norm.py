"""BatchNorm that adds a residual and applies ReLU in the same pass, by the kernels of `kernels.batch_norm_triton`.

One set of kernels serves the statistics of a rank, of views, of groups of rows and of all ranks. Autograd keeps the input x
and, with a residual, the output y, which the next convolution keeps anyway.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as funcol
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from kernels import batch_norm
from trainer.config.schema import ModelConfig
from trainer.errors import InputError
from trainer.models.batch_norm import ViewBatchNorm, over_ranks


def check_device(config: ModelConfig, device: torch.device) -> None:
    """Raise InputError if the backend of BatchNorm cannot run on this device."""
    from kernels.backends import why_no_kernels

    if config.batch_norm_backend == "torch":
        return
    reason = why_no_kernels(device.type)
    if reason:
        raise InputError(f"model.batch_norm_backend {config.batch_norm_backend} {reason}: set it to torch")


class Statistics(NamedTuple):
    """Statistics by which a BatchNorm normalises."""

    mean: Tensor
    """(p, C)"""
    var: Tensor
    """(p, C), biased"""
    samples: int
    """Number of rows of each part, on all ranks of the group; 0: the running statistics, which do not depend on the input."""
    group_name: str | None
    """Process group over which they are taken; None: this rank."""


class _Normalise(torch.autograd.Function):
    """The autograd node of y = relu(weight (x - mean) / sqrt(var + eps) + bias + residual).

    mean and var (P, C) get no gradient. If they are statistics of x, the gradient of x covers its effect on them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        relu: bool,
        samples: int,
        group_name: str | None,
    ) -> Tensor:
        """samples: number of rows whose statistics are a line of mean and var, on all ranks of the group; 0: rows of others."""
        y = batch_norm.normalise(x, mean, var, weight, bias, residual, eps, relu)
        ctx.relu = relu
        ctx.eps = eps
        ctx.samples = samples
        ctx.group_name = group_name
        ctx.has_residual = residual is not None
        # Without a residual, the sign of y follows from x, and backward reads one tensor less.
        kept_y = y if ctx.has_residual and relu else None
        ctx.save_for_backward(x, kept_y, mean, var, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight, bias and residual. Raises NotImplementedError under create_graph."""
        refuse_second_derivative()
        x, y, mean, var, weight, bias = ctx.saved_tensors
        own_sums, g = batch_norm.sums(dy, x, y, mean, var, weight, bias, ctx.eps, ctx.relu)
        relu = ctx.relu
        if y is not None:
            # From here on, g takes the place of dy, and y is not needed any more.
            dy, relu = g, False
        sums = joint_sums(own_sums, ctx.samples, ctx.group_name)
        dx = batch_norm.gradient(dy, x, mean, var, weight, bias, sums, ctx.samples, ctx.eps, relu)
        grad_weight, grad_bias = parameter_gradients(own_sums, var, weight, bias, ctx.eps)
        grad_residual = dy if ctx.has_residual else None
        return dx, grad_weight, grad_bias, grad_residual, None, None, None, None, None, None


def refuse_second_derivative() -> None:
    """Raise NotImplementedError if this backward runs under create_graph."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "BatchNorm by Triton kernels has no second derivative: call backward without create_graph, or set "
            "model.batch_norm_backend to torch"
        )


def joint_sums(own_sums: Tensor, samples: int, group_name: Any) -> Tensor | None:
    """Return the sums (2, p, C) of the backward over the rows of the `Statistics`; None: these do not depend on the rows."""
    if samples and group_name is not None:
        return funcol.all_reduce(own_sums, "sum", group_name)
    return own_sums if samples else None


def parameter_gradients(
    own_sums: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias from the sums of this rank. DDP adds up the ranks."""
    # The kernels sum g (x - mean); its gradient is divided by the standard deviation.
    sum_g, products = own_sums.unbind()
    grad_weight = None if weight is None else (products * (var + eps).rsqrt()).sum(0).to(weight.dtype)
    grad_bias = None if bias is None else sum_g.sum(0).to(bias.dtype)
    return grad_weight, grad_bias


class FusedBatchNorm(ViewBatchNorm):
    """ViewBatchNorm by Triton kernels, with an optional residual and ReLU."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.relu = False
        """Whether the output passes through ReLU."""
        # timm's BatchNorm may include a ReLU.
        extras = [extra for extra in self.after if not isinstance(extra, nn.Identity)]
        if len(extras) == 1 and type(extras[0]) is nn.ReLU:
            self.relu = True
            extras = []
        self.after = nn.Sequential(*extras)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalise x (p*N, C, ...) and add the residual of the same shape.

        Raises ValueError if the rows do not divide into equal parts, or if a part has too few values for a variance."""
        mean, var, samples, group_name = self.statistics_of(x)
        y = _Normalise.apply(x, self.weight, self.bias, residual, mean, var, self.eps, self.relu, samples, group_name)
        return self.after(y)

    def statistics_of(self, x: Tensor) -> Statistics:
        """Return the statistics of x and update the running ones; in evaluation mode return the running ones."""
        if not self.training:
            return self._running()
        with torch.no_grad():
            mean, var = batch_norm.moments(x, self.parts_of(len(x)))
            return self.statistics_from(mean, var, x)

    def statistics_from(self, mean: Tensor, var: Tensor, x: Tensor) -> Statistics:
        """Return the same as `statistics_of` from the moments (p, C) of this rank's x."""
        if not self.training:
            return self._running()
        # All ranks of the group hold the same number of rows.
        samples = x[:, 0].numel() // len(mean) * (self.world_size if self.group_name else 1)
        if samples < 2:
            raise ValueError(
                f"BatchNorm needs at least 2 values for each channel, but an input {tuple(x.shape)} has {samples}"
            )
        if self.group_name is not None:
            mean, var = over_ranks(mean, var, self.group_name, self.world_size)
        self._update_running(mean, var * (samples / (samples - 1)))
        return Statistics(mean, var, samples, self.group_name)

    def parts_of(self, num_rows: int) -> int:
        """Return the number of parts of an input. Raises ValueError if they are not equal."""
        if not self.training:
            return 1
        parts = num_rows // self.rows if self.rows and self.group_name is None else self.num_views
        if parts < 1 or num_rows % parts:
            raise ValueError(f"BatchNorm takes statistics of {parts} equal parts, but its input has {num_rows} rows")
        return parts

    def _running(self) -> Statistics:
        return Statistics(self.running_mean[None], self.running_var[None], 0, None)


def fuse_activations(module: nn.Module) -> nn.Module:
    """Move each ReLU after a FusedBatchNorm, and the addition of a residual in timm's ResNets, into the BatchNorm.

    An Identity takes the place of the ReLU. The names of parameters and buffers do not change."""
    for part in module.modules():
        if type(part) is nn.Sequential:
            names = list(part._modules)
            for norm, activation in pairwise(names):
                _fuse(part, norm, activation)
        elif type(part) is ResNet:
            _fuse(part, "bn1", "act1")
        elif type(part) is BasicBlock:
            if isinstance(part.drop_block, nn.Identity):
                _fuse(part, "bn1", "act1")
            if _adds_directly(part) and _fuse(part, "bn2", "act2"):
                part.__class__ = _FusedBasicBlock
        elif type(part) is Bottleneck:
            _fuse(part, "bn1", "act1")
            if isinstance(part.drop_block, nn.Identity):
                _fuse(part, "bn2", "act2")
            if _adds_directly(part) and _fuse(part, "bn3", "act3"):
                part.__class__ = FusedBottleneck
    return module


def _adds_directly(block: Any) -> bool:
    """Return whether nothing lies between the last BatchNorm of a block and the addition of the residual."""
    return block.se is None and block.drop_path is None


def _fuse(module: nn.Module, norm_name: str, activation_name: str) -> bool:
    """Move a ReLU into the BatchNorm before it, and return whether they are such a pair."""
    norm, activation = getattr(module, norm_name), getattr(module, activation_name)
    if not isinstance(norm, FusedBatchNorm) or len(norm.after) or type(activation) is not nn.ReLU:
        return False
    norm.relu = True
    setattr(module, activation_name, nn.Identity())
    return True


class _FusedBasicBlock(BasicBlock):
    """timm's BasicBlock, whose last BatchNorm adds the residual and applies ReLU."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Compute what BasicBlock does."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.drop_block(self.bn1(self.conv1(x))))
        return self.bn2(self.conv2(self.aa(x)), shortcut)


class FusedBottleneck(Bottleneck):
    """timm's Bottleneck, whose last BatchNorm adds the residual and applies ReLU."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Compute what Bottleneck does."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.drop_block(self.bn2(self.conv2(x))))
        return self.bn3(self.conv3(self.aa(x)), shortcut)
