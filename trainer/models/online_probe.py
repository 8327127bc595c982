"""Online probe: a linear classifier that learns from the features of the pre-training, in the same step.

It shows the progress of a run without a separate evaluation. The features are detached, and it draws no random number, so
the encoder learns bit for bit what it would learn without it.

Shapes: R = d*n views of this rank or micro-batch (view-major), n images, F features, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.distributed.process_group import sum_over_ranks
from trainer.distributed.ranks import Ranks
from trainer.metric import Metric
from trainer.optimizer import update


class OnlineProbe:
    """Linear classifier that starts at zero and is trained by Adam. Call `add` for each micro-batch, then `update`."""

    metrics = {"probe_top1": Metric("probe", "probe {:.1f}%")}  # noqa: RUF012 (read only)
    """Percentage of labelled training views that were classified correctly just before they were learnt from."""

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        views_per_step: int,
        learning_rate: float,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """views_per_step: views of a step of all ranks together."""
        self.weight = torch.zeros(num_classes, num_features, device=device, requires_grad=True)
        self.bias = torch.zeros(num_classes, device=device, requires_grad=True)
        self._optimizer = torch.optim.Adam([self.weight, self.bias], lr=learning_rate, fused=device.type == "cuda")
        self._views_per_step = views_per_step
        self._learning_rate = learning_rate
        self._ranks = ranks
        # Views that were right, and views with a label: of this rank's step, and of all ranks since the last logged line.
        self._counts = torch.zeros(2, device=device)
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add the gradient and the counts of a micro-batch. features: (R, F), detached. labels: (n,) int64, -1: no label."""
        labels = labels.repeat(len(features) // len(labels))  # view-major: all images of view 0 come first
        logits = functional.linear(features.float(), self.weight, self.bias)
        # Divide by a constant, so that ranks and micro-batches can be added up.
        loss = functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / self._views_per_step
        loss.backward()
        # An image without a label has the label -1, which no guess equals.
        is_right = logits.argmax(1) == labels
        self._counts += torch.stack([is_right.sum(), (labels >= 0).sum()])

    def update(self, skipped: Tensor) -> None:
        """Apply the gradients of all ranks. skipped: 0-d bool; true changes nothing."""
        weight_grad = self.weight.grad
        bias_grad = self.bias.grad
        assert weight_grad is not None
        assert bias_grad is not None
        sum_over_ranks([weight_grad, bias_grad, self._counts], self._ranks)
        update(self._optimizer, self._learning_rate, skipped)
        self._optimizer.zero_grad()
        # A skipped step learns nothing, so its views do not count either.
        self._sums += torch.where(skipped, 0.0, self._counts)
        self._counts.zero_()

    def take(self) -> dict[str, Tensor]:
        """Return the metrics since the last call over all ranks, 0-d float64; NaN if no view had a label."""
        # Without a labelled view this is 0 / 0, which is NaN.
        right, labelled = self._sums.unbind()
        top1 = 100 * right / labelled
        self._sums = torch.zeros_like(self._sums)
        return {"probe_top1": top1}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        # The options of the optimizer follow from the settings, so only the moments are kept.
        moments = self._optimizer.state_dict()["state"]
        return {"weight": self.weight, "bias": self.bias, "sums": self._sums, "optimizer": moments}

    def load(self, state: dict[str, Any]) -> bool:
        """Restore what `state` returned. Returns False, and changes nothing, if classes or features differ in number."""
        # The run may continue on a set with other classes.
        if state["weight"].shape != self.weight.shape:
            return False
        with torch.no_grad():
            self.weight.copy_(state["weight"])
            self.bias.copy_(state["bias"])
            self._sums.copy_(state["sums"])
        options = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": options})
        return True
