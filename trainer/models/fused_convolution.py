"""1x1 convolutions of a ResNet's bottleneck blocks, fused with the BatchNorms around them by `kernels.conv1x1_triton`.

A block is conv1 (1x1), bn1, ReLU, conv2 (3x3), bn2, ReLU, conv3 (1x1), bn3, shortcut, ReLU. conv1, conv3 and the convolution of
the shortcut compute the statistics of the BatchNorm after them, and conv3 applies bn2 and its ReLU while it reads the output of
conv2. The output of bn2 is thus never stored. Autograd keeps the inputs and outputs of the convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.resnet import Bottleneck
from torch import Tensor, nn

from kernels import batch_norm, conv1x1
from trainer.errors import InputError
from trainer.models.fused_batch_norm import (
    FusedBatchNorm,
    FusedBottleneck,
    joint_sums,
    parameter_gradients,
    refuse_second_derivative,
)


def fuse_convolutions(encoder: nn.Module, backbone: str) -> nn.Module:
    """Fuse the 1x1 convolutions of each bottleneck block with their BatchNorms, after `fuse_activations`.

    The names of parameters and buffers do not change. Raises InputError if there is no such block."""
    blocks = [block for block in encoder.modules() if _can_fuse(block)]
    if not blocks:
        raise InputError(
            f"model.batch_norm_backend triton_conv fuses the bottleneck blocks of timm's ResNets, but {backbone} has none that "
            "it can fuse: set it to triton, or model.backbone to resnet50"
        )
    for block in blocks:
        block.__class__ = _ConvolutionBottleneck
        shortcut: Any = block.downsample
        if shortcut is not None and _is_pointwise(shortcut[-2]) and isinstance(shortcut[-1], FusedBatchNorm):
            shortcut.__class__ = _ConvolutionShortcut
    return encoder


def _can_fuse(block: Any) -> bool:
    """Return whether a block is a bottleneck with nothing but BatchNorm and ReLU after its convolutions."""
    if type(block) is not FusedBottleneck:
        return False
    between = (block.act1, block.drop_block, block.act2, block.aa)
    norms = (block.bn1, block.bn2, block.bn3)
    return (
        all(isinstance(module, nn.Identity) for module in between)
        and all(isinstance(norm, FusedBatchNorm) and norm.relu for norm in norms)
        and all(_is_pointwise(convolution) for convolution in (block.conv1, block.conv3))
    )


def _is_pointwise(module: Any) -> bool:
    """Return whether this is a plain 1x1 convolution without bias, of any stride."""
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == (1, 1)
        and module.padding == (0, 0)
        and module.groups == 1
        and module.bias is None
        and module.stride[0] == module.stride[1]
    )


class _ConvolutionBottleneck(Bottleneck):
    """timm's Bottleneck, whose 1x1 convolutions are fused with BatchNorm."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Compute what Bottleneck does."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = convolve_and_normalise(x, self.conv1, self.bn1)
        x = self.conv2(x)
        return convolve_and_normalise(x, self.conv3, self.bn3, residual=shortcut, before=self.bn2)


class _ConvolutionShortcut(nn.Sequential):
    """Downsampling layers of a block that end with a 1x1 convolution and BatchNorm."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the sequence does."""
        *pools, convolution, norm = self
        for pool in pools:
            x = pool(x)
        return convolve_and_normalise(x, convolution, norm)


def convolve_and_normalise(
    x: Tensor,
    convolution: Any,
    norm: Any,
    *,
    residual: Tensor | None = None,
    before: Any = None,
) -> Tensor:
    """Return norm(convolution(x), residual), or norm(convolution(before(x)), residual). `before` includes a ReLU.

    x (N, I, H, W). Both BatchNorms are FusedBatchNorm."""
    # An operator of our own gets no casts from autocast, so they are here.
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    stride = convolution.stride[0]
    given: tuple[Any, ...] = (None, None, None, None, None)
    options: tuple[Any, ...] = ()
    coefficients = None
    with torch.no_grad():
        weight = convolution.weight.flatten(1).to(x.dtype)
        if before is not None:
            mean, var, *counted = before.statistics_of(x)
            coefficients = conv1x1.coefficients(mean, var, before.weight, before.bias, None, 0, before.eps)
            given = (before.weight, before.bias, mean, var, coefficients)
            options = (before.eps, *counted)
        y, *moments = conv1x1.forward(x, weight, coefficients, norm.parts_of(len(x)), stride)
        mean, var, *counted = norm.statistics_from(*moments, y)
    return _ConvolveNormalise.apply(
        x,
        convolution.weight,
        residual,
        norm.weight,
        norm.bias,
        weight,
        y,
        mean,
        var,
        *given,
        (norm.eps, norm.relu, *counted),
        options,
        stride,
    )


class _ConvolveNormalise(torch.autograd.Function):
    """The autograd node of both BatchNorms and the convolution between them.

    The output y of the convolution and all statistics are computed before, and get no gradient of their own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        y: Tensor,
        mean: Tensor,
        var: Tensor,
        before_weight: Tensor | None,
        before_bias: Tensor | None,
        before_mean: Tensor | None,
        before_var: Tensor | None,
        before: Tensor | None,
        norm_options: tuple[float, bool, int, str | None],
        before_options: tuple[Any, ...],
        stride: int,
    ) -> Tensor:
        """parameter: weight of the convolution as trained. weight: the same in the type of x, (O, I). before: coefficients.

        The options are eps, for `norm` whether it has a ReLU, and number of samples and group of the `Statistics`."""
        eps, relu, _, _ = norm_options
        out = batch_norm.normalise(y, mean, var, norm_weight, norm_bias, residual, eps, relu)
        ctx.options = norm_options, before_options, stride
        ctx.has_residual = residual is not None
        kept_out = out if ctx.has_residual and relu else None
        ctx.save_for_backward(
            x,
            parameter,
            weight,
            y,
            kept_out,
            mean,
            var,
            norm_weight,
            norm_bias,
            before_mean,
            before_var,
            before_weight,
            before_bias,
            before,
        )
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the weights and the residual. Raises NotImplementedError under create_graph."""
        refuse_second_derivative()
        x, parameter, weight, y, out, *norm, before_mean, before_var, before_weight, before_bias, before = (
            ctx.saved_tensors
        )
        (eps, relu, samples, group_name), before_options, stride = ctx.options
        # the sums of the BatchNorm after the convolution, whose gradient the kernels then compute while they read
        sums, g = batch_norm.sums(dy, y, out, *norm, eps, relu)
        if out is not None:
            dy, relu = g, False
        mean, var, norm_weight, norm_bias = norm
        everywhere = joint_sums(sums, samples, group_name)
        after = conv1x1.coefficients(mean, var, norm_weight, norm_bias, everywhere, samples, eps)
        norm_gradients = parameter_gradients(sums, var, norm_weight, norm_bias, eps)

        dx, sums = conv1x1.input_gradient(dy, y, after, weight, x, before, relu, stride)
        if before is not None:
            before_eps, samples, group_name = before_options
            everywhere = joint_sums(sums, samples, group_name)
        # While an all-reduce is under way, compute the gradient of the weight.
        grad_weight = conv1x1.weight_gradient(dy, y, after, x, before, relu, stride)
        grad_weight = grad_weight.to(parameter.dtype).as_strided(parameter.shape, parameter.stride())
        before_gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        if before is not None:
            before_norm = before_mean, before_var, before_weight, before_bias
            dx = batch_norm.gradient(dx, x, *before_norm, everywhere, samples, before_eps, False)
            before_gradients = parameter_gradients(sums, before_var, before_weight, before_bias, before_eps)
        grad_residual = dy if ctx.has_residual else None
        constants = (None,) * 4
        return dx, grad_weight, grad_residual, *norm_gradients, *constants, *before_gradients, *(None,) * 6
