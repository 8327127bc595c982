"""Adam, AdamW and SGD (torch's), LARS and LARC. All can skip an update because of a value on the device, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import OptimizerConfig
from trainer.errors import InputError

_LARC_EPS = 1e-8  # apex's default, which SwAV keeps


def check_device(config: OptimizerConfig, device: torch.device) -> None:
    """Raise InputError if the optimizer's backend cannot run on this device."""
    # Not at the top of the file, because the evaluator imports this module and needs no kernels.
    from kernels.backends import why_not

    reason = why_not(config.backend, device.type, size=1, in_float64=False)
    if reason:
        raise InputError(f"optimizer.backend {config.backend} {reason}: set optimizer.backend to auto or torch")


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    constant_rate: Sequence[nn.Parameter] = (),
    peak: float | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of all parameters of `model` that need a gradient. `update` sets the learning rate in each step.

    constant_rate: parameters whose learning rate is `peak` (`schedule.peak_learning_rate`) in every step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained, "weight_decay": config.weight_decay, "adapt": True}]
    if config.name in ("lars", "adamw"):
        groups = parameter_groups(model, config.weight_decay)
    if constant_rate:
        groups = _with_constant_rate(groups, constant_rate, peak)
    if config.name in ("lars", "larc"):
        return Lars(
            groups,
            momentum=config.momentum,
            trust_coefficient=config.trust_coefficient,
            rate_in_momentum=config.name == "lars" and config.rate_in_momentum,
            larc=config.name == "larc",
            by_triton=config.backend == "triton",
        )
    if config.name == "sgd" and config.backend == "triton":
        # Without adaptation, and with the rate outside of the momentum buffer, LARS is SGD with momentum.
        plain = [{**group, "adapt": False} for group in groups]
        return Lars(plain, momentum=config.momentum, rate_in_momentum=False, by_triton=True)
    # Only torch's fused kernels can skip an update by a value on the device.
    fused = device.type == "cuda"
    if config.name == "adam":
        return torch.optim.Adam(groups, lr=config.learning_rate, fused=fused)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate, fused=fused)
    sgd = torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)
    if config.momentum:
        # If its first update is skipped, the fused kernel would keep the buffers that it has allocated but not filled.
        for p in trained:
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return sgd


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide the parameters as in SimCLR: matrices and kernels get weight decay and adaptation, BatchNorm and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "adapt": False},
    ]


def _with_constant_rate(
    groups: list[dict[str, Any]], constant_rate: Sequence[nn.Parameter], peak: float | None
) -> list[dict[str, Any]]:
    """Move the parameters with a constant learning rate to groups of their own, after the others."""
    if peak is None:
        raise ValueError("parameters with a constant learning rate need its value: pass peak to build_optimizer")
    constant = set(constant_rate)
    changing = [{**group, "params": [p for p in group["params"] if p not in constant]} for group in groups]
    fixed = [
        {**group, "params": [p for p in group["params"] if p in constant], "constant_rate": peak} for group in groups
    ]
    return changing + fixed


def gradient_norms(
    optimizer: torch.optim.Optimizer, gradients: list[Tensor], scale: Tensor | None = None
) -> list[Tensor]:
    """Return numbers (0-d) that are finite only if all gradients are. The step calls this before `update`.

    scale: loss scale of fp16. The Triton kernels divide the gradients by it, now and in `update`, and keep the norms for
    `update`. With every other optimizer the gradients are divided here, in place, after their norms are taken."""
    if isinstance(optimizer, Lars) and optimizer.uses_kernels:
        return optimizer.measure(scale)
    norms = torch._foreach_norm(gradients)
    if scale is not None:
        torch._foreach_mul_(gradients, 1 / scale)
    return list(norms)


def update(optimizer: torch.optim.Optimizer, learning_rate: float, skip: Tensor) -> None:
    """Apply the gradients. If `skip` (0-d bool, on the device) is true, weights and moments stay as they are."""
    for group in optimizer.param_groups:
        # SimSiam's predictor has a group with a constant rate.
        group["lr"] = group.get("constant_rate", learning_rate)
    if skip.device.type == "cpu":
        if not skip:
            optimizer.step()
        return
    # torch's fused kernels and Lars read this attribute, and update nothing if it is 1.
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    optimizer.step()


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive learning rates: LARS, and LARC.

    LARS:  g += wd w;  trust = eta |w| / |g| (1 if either is 0)
    LARC:  trust = eta |w| / (|g| + wd |w| + 1e-8);  g += wd w  (if either norm is 0, trust is 1 and there is no decay)
    Learning rate in the momentum buffer (SimCLR):  v = m v + lr trust g;  w -= v
    Learning rate outside of it (BYOL, SwAV):       v = m v + trust g;     w -= lr v

    LARC is that of apex with clip=False, which SwAV uses. In a group with "adapt" false, trust is 1; `parameter_groups`
    makes such a group of biases and BatchNorm.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        lr: float = 0.0,
        momentum: float = 0.9,
        trust_coefficient: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        rate_in_momentum: bool = True,
        larc: bool = False,
        by_triton: bool = False,
    ) -> None:
        """groups: parameters, or groups of them. The other values are defaults of groups that do not have their own.

        by_triton: update with the CUDA kernels of `kernels.lars_triton`."""
        options = {"momentum": momentum, "trust_coefficient": trust_coefficient, "weight_decay": weight_decay}
        super().__init__(
            groups, {"lr": lr, "adapt": True, **options, "rate_in_momentum": rate_in_momentum, "larc": larc}
        )
        self._kernels: list[Any] = []  # one for each group
        if by_triton:
            from kernels.lars_triton import GroupUpdate  # loads triton, which machines without a GPU may lack

            self._kernels = [GroupUpdate() for _ in self.param_groups]
        # The loss scale of the step that the kernels have measured, until they update.
        self._measured: Tensor | None = None

    @property
    def uses_kernels(self) -> bool:
        """Whether the Triton kernels update the weights."""
        return bool(self._kernels)

    @torch.no_grad()
    def measure(self, scale: Tensor | None = None) -> list[Tensor]:
        """Let the Triton kernels compute what `step` needs. Return numbers (0-d) that are finite only if all gradients are.

        scale: loss scale (0-d float32, on the device) by which this and `step` divide the gradients."""
        device = self.param_groups[0]["params"][0].device
        self._measured = torch.ones((), device=device) if scale is None else scale.clone()
        measured = []
        for group, kernels in zip(self.param_groups, self._kernels, strict=True):
            weights, gradients, buffers = self._tensors(group)
            if weights:
                measured.append(kernels.measure(weights, gradients, buffers, self._measured, _rule(group)))
        return measured

    def _tensors(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the weights of a group that have gradients, the gradients, and the momentum buffers."""
        # A parameter without a gradient gets a buffer as well, because a resumed run expects one for each parameter.
        for p in group["params"]:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        weights = [p for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in weights if p.grad is not None]
        return weights, gradients, [self.state[p]["momentum_buffer"] for p in weights]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights in place; gradients may be overwritten. closure: computes loss and gradients first.

        If `self.found_inf` (0-d float, on the device) is set, the update changes nothing if it is 1. All tensors of a group
        are then updated together, without waiting for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        # A program other than the trainer may call this without `measure`.
        if self._kernels and self._measured is None:
            self.measure()
        for number, group in enumerate(self.param_groups):
            weights, gradients, buffers = self._tensors(group)
            if not weights:
                continue
            if self._measured is not None:
                failed = torch.zeros_like(self._measured) if found_inf is None else found_inf
                self._kernels[number].update(self._measured, failed, *_rates(group), _rule(group))
            elif found_inf is None:
                for w, g, v in zip(weights, gradients, buffers, strict=True):
                    _update_one(w, g, v, group)
            else:
                _update_together(weights, gradients, buffers, group, found_inf)
        self._measured = None
        return loss


def _update_one(w: Tensor, g: Tensor, v: Tensor, group: dict[str, Any]) -> None:
    """Update one tensor, on a CPU. Each pass then finds in the cache what the pass before it read: a ResNet-50 takes 58 ms,
    against 73 ms if each pass covers all tensors."""
    decay = group["weight_decay"]
    rate_inside, rate_outside = _rates(group)
    if decay and not group["larc"]:
        g.add_(w, alpha=decay)
    if group["adapt"]:
        # A tensor of zeros, such as a bias at the start, has no ratio of norms.
        norm_w, norm_g = w.norm().item(), g.norm().item()
        if norm_w > 0 and norm_g > 0:
            denominator = norm_g
            if group["larc"]:
                g.add_(w, alpha=decay)
                denominator += decay * norm_w + _LARC_EPS
            rate_inside *= group["trust_coefficient"] * norm_w / denominator
    w.sub_(v.mul_(group["momentum"]).add_(g, alpha=rate_inside), alpha=rate_outside)


def _rule(group: dict[str, Any]) -> Any:
    """Return the options of a group as the kernels take them."""
    from kernels.lars_triton import Rule

    trust = group["trust_coefficient"] if group["adapt"] else None
    return Rule(group["momentum"], group["weight_decay"], trust, larc=group["larc"] and group["adapt"])


def _rates(group: dict[str, Any]) -> tuple[float, float]:
    """Return the factors of the gradient in the momentum buffer, and of the buffer in the update of the weights."""
    return (group["lr"], 1.0) if group["rate_in_momentum"] else (1.0, group["lr"])


def _update_together(weights: Any, gradients: Any, buffers: Any, group: dict[str, Any], found_inf: Tensor) -> None:
    """Update all tensors of a group with few launches, on a GPU. found_inf: 1 leaves everything as it is."""
    keep = 1 - found_inf
    # NaN times 0 is NaN, so gradients are multiplied as integers, which clears every bit.
    torch._foreach_mul_([g.view(torch.int32) for g in gradients], keep.to(torch.int32))
    decay = group["weight_decay"]
    if decay and not group["larc"]:
        torch._foreach_add_(gradients, weights, alpha=decay)
    # If keep is 0, the gradient is 0, the buffer is multiplied by 1, and 0 times the buffer is subtracted.
    rate_inside, rate_outside = _rates(group)
    rate = rate_inside * keep
    if group["adapt"]:
        norm_w, norm_g = (torch.stack(torch._foreach_norm(x)) for x in (weights, gradients))
        adapted = (norm_w > 0) & (norm_g > 0)
        denominator = norm_g
        if group["larc"]:
            decays = decay * adapted.to(norm_w.dtype)
            torch._foreach_add_(gradients, torch._foreach_mul(weights, list(decays.unbind())))
            denominator = norm_g + decay * norm_w + _LARC_EPS
        trust = group["trust_coefficient"] * norm_w / denominator
        trust = torch.where(adapted, trust, 1.0) * rate
        torch._foreach_mul_(gradients, list(trust.unbind()))
    else:
        torch._foreach_mul_(gradients, rate)
    torch._foreach_mul_(buffers, 1 - (1 - group["momentum"]) * keep)
    torch._foreach_add_(buffers, gradients)
    torch._foreach_add_(weights, torch._foreach_mul(buffers, -rate_outside * keep))
