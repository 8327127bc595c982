"""One training step of any method: forward, loss, backward, agreement over ranks, optimizer. It never waits for the device.

Shapes: R = d*N views of this rank (view-major), S view size in pixels, k embedding size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from trainer.distributed.process_group import agree
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.grad_scaler import GradScaler
from trainer.methods.method import LossOutput, Method
from trainer.models.online_probe import OnlineProbe
from trainer.models.untrained_state import UntrainedState
from trainer.optimizer import gradient_norms, update
from trainer.run.faults import GRADIENT_FAULT, fault_code, fault_codes
from trainer.run.step_times import StepTimes

_MOST_DELAY = 2e9  # in microseconds; the agreement takes integers of 32 bits


class RankFlags(NamedTuple):
    """Flags on which all ranks agree in a step. Each is the maximum over all ranks."""

    fault: Tensor  # 0: none; else a code of `faults.fault_codes`
    stop: Tensor  # GO_ON, PREEMPT or STOP of `signals`
    save: Tensor  # 1: save a checkpoint


class StepResult(NamedTuple):
    """Results of a step, on the device; the loop reads them later, so that the step does not wait."""

    loss: Tensor  # 0-d float32, of this rank's loss group
    metrics: dict[str, Tensor]  # 0-d, those of the method
    embeddings: Tensor  # (R, k) float32, without gradient
    skipped: Tensor  # 0-d bool, the same on all ranks: the update was not applied
    flags: RankFlags  # 0-d int32 each, the same on all ranks
    delay: Tensor | float = 0.0  # longest `delay` of all ranks in microseconds, 0-d int32


class TrainStep:
    """Training step of one rank, with the method and optimizer that it updates. Call it once for each step."""

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        *,
        num_views: int,
        images: ImageRange,
        ranks: Ranks,
        wrapped: nn.Module | None = None,
        autocast_dtype: torch.dtype | None = None,
        micro_batches: int = 1,
        online_probe: OnlineProbe | None = None,
    ) -> None:
        """images: the images of each step that this rank holds. wrapped: the method's networks from
        `process_group.wrap_model`; None: the networks are not wrapped.

        autocast_dtype: None for float32 throughout; with float16 the loss is scaled.
        micro_batches: consecutive parts of a rank's images, whose gradients are added up.
        online_probe: learns from the features of the method's encoder, which must keep them.
        """
        self.method = method
        self.optimizer = optimizer
        self.networks: Any = wrapped or method.networks
        self.num_views = num_views
        self.images = images
        self.ranks = ranks
        self.autocast_dtype = autocast_dtype
        self.micro_batches = micro_batches
        self.online_probe = online_probe
        self.metrics = {**method.metrics, **(online_probe.metrics if online_probe else {})}
        self.device = next(method.networks.parameters()).device
        self.untrained_state = UntrainedState(method.networks)
        codes = fault_codes(len(method.checks), ranks.rank, ranks.world_size)
        self.fault_codes = torch.tensor(codes, dtype=torch.int32, device=self.device)
        self.grad_scaler = GradScaler(self.device) if autocast_dtype == torch.float16 else None
        self.times = StepTimes(self.device)
        """Times of the last step and of its parts "forward" and "update"."""

    def __call__(
        self,
        pixels: Tensor,
        step: int,
        learning_rate: float,
        *,
        labels: Tensor | None = None,
        stop: int = 0,
        save: bool = False,
        delay: float = 0.0,
        apply: bool = True,
    ) -> StepResult:
        """Make one update. pixels: (R, 3, S, S) uint8, or normalised views (`Normalize`), channels_last. step: from 0.

        labels: (N,) int64 of this rank's images, on the device, -1: no label; only the online probe needs them.
        stop: how this rank was asked to stop (`signals`: GO_ON, PREEMPT or STOP). save: whether it wants the run to be saved.
        All ranks learn of both in the result. delay: seconds by which this rank came late to the step.
        apply: False makes the whole step but skips its update, so that nothing changes.
        """
        self.times = StepTimes(self.device)
        self.untrained_state.remember()
        output = self._forward_backward(pixels, step, labels)

        with record_function("agree"):
            self.method.before_update(step)
            gradients = [p.grad for p in self.method.networks.parameters() if p.grad is not None]
            norms = gradient_norms(self.optimizer, gradients, self.grad_scaler.scale if self.grad_scaler else None)
            fault = fault_code(output.ok, output.loss, norms, self.fault_codes)
            microseconds = int(min(1e6 * delay, _MOST_DELAY))
            own_values = [fault, *(fault.new_full((), value) for value in (stop, save, microseconds))]
            *agreed, longest_delay = agree(torch.stack(own_values), self.ranks).unbind()
            flags = RankFlags(*agreed)
            skipped = flags.fault > 0 if apply else torch.ones_like(flags.fault, dtype=torch.bool)

        # Every rank runs this code, because only the device knows whether the update is skipped.
        with record_function("update"), self.times.span("update"):
            if self.grad_scaler and apply:
                self.grad_scaler.update(flags.fault == GRADIENT_FAULT)
            update(self.optimizer, learning_rate, skipped)
            self.optimizer.zero_grad(set_to_none=True)
            self.method.after_update(step, skipped)
            self.untrained_state.restore_if(skipped)
            if self.online_probe:
                self.online_probe.update(skipped)
        self.times.finish()
        return StepResult(output.loss, output.metrics, output.embeddings, skipped, flags, longest_delay)

    def _forward_backward(self, pixels: Tensor, step: int, labels: Tensor | None) -> LossOutput:
        """Add up the gradients of all micro-batches. DDP averages them over ranks in the backward of the last one."""
        # One micro-batch needs no copy of its outputs.
        count = self.micro_batches
        if count == 1:
            return self._micro_batch(pixels, step, self.images, labels)
        size = self.images.count // count
        # DDP sends gradients in the backward of the last micro-batch only, when they are complete.
        outputs = []
        for number, part in enumerate(split_images(pixels, self.num_views, count)):
            images = ImageRange(self.images.first + number * size, size)
            part_labels = None if labels is None else labels[number * size : (number + 1) * size]
            sends = number == count - 1 or self.ranks.world_size == 1
            with nullcontext() if sends else self.networks.no_sync():
                outputs.append(self._micro_batch(part, step, images, part_labels))
        return self._joined(outputs)

    def _micro_batch(self, pixels: Tensor, step: int, images: ImageRange, labels: Tensor | None) -> LossOutput:
        """Forward, loss and backward of `images`; adds the gradients to those of the micro-batches before."""
        dtype = self.autocast_dtype
        autocast = torch.autocast(self.device.type, dtype, enabled=dtype is not None)
        with record_function("forward"), self.times.span("forward"), autocast:
            outputs = self.networks(pixels)
        with record_function("loss"):
            result = self.method.loss(outputs, step, images)
            _check_declared(result, self.method)
            scaled = result.loss / self.micro_batches if self.micro_batches > 1 else result.loss
            scaled = scaled * self.grad_scaler.scale if self.grad_scaler else scaled
        with record_function("backward"), self.untrained_state.unchanged():
            scaled.backward()
        if self.online_probe and labels is not None:
            networks: Any = self.method.networks
            self.online_probe.add(networks.features, labels)
        # Copy the embeddings, because the next replay of CUDA graphs overwrites them.
        return result._replace(loss=result.loss.detach(), embeddings=result.embeddings.detach().clone())

    def _joined(self, outputs: list[LossOutput]) -> LossOutput:
        """Join the outputs of a step's micro-batches."""
        metrics = {}
        for name, metric in self.method.metrics.items():
            values = torch.stack([output.metrics[name] for output in outputs])
            metrics[name] = values.min() if metric.over == "min" else values.mean()
        by_view = torch.cat([output.embeddings.unflatten(0, (self.num_views, -1)) for output in outputs], dim=1)
        loss = torch.stack([output.loss for output in outputs]).mean()
        ok = torch.stack([output.ok for output in outputs]).all(0)
        return LossOutput(loss, ok, metrics, by_view.flatten(0, 1))


def _check_declared(output: LossOutput, method: Method) -> None:
    """Raise ValueError if the loss returned other metrics, or another number of checks, than the method declares."""
    name = type(method).__name__
    if output.metrics.keys() != method.metrics.keys():
        raise ValueError(
            f"{name}.loss returned the metrics {sorted(output.metrics)}, but {name}.metrics declares "
            f"{sorted(method.metrics)}: give both the same names"
        )
    if output.ok.shape != (len(method.checks),):
        raise ValueError(
            f"{name}.loss returned ok of shape {tuple(output.ok.shape)}, but {name}.checks declares {len(method.checks)} "
            "check(s): return one bool for each"
        )


def split_images(pixels: Tensor, num_views: int, count: int) -> list[Tensor]:
    """Split a batch into `count` micro-batches of consecutive images, each with all views of its images.

    pixels and the results: (R, 3, S, S) channels_last, view-major."""
    # Move the channels to the end of the shape, because flatten copies in the order of the shape.
    by_view = pixels.permute(0, 2, 3, 1).unflatten(0, (num_views, -1))
    return [part.flatten(0, 1).permute(0, 3, 1, 2) for part in by_view.chunk(count, dim=1)]
