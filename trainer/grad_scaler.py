"""The loss scale of fp16, kept on the device.

fp16 cannot represent numbers below 6e-8. The loss is multiplied by a scale before backward, so that small gradients survive,
and the gradients are divided by it afterwards. The scale adapts: it is halved after an overflow, and doubled after many
steps without one (Micikevicius et al., "Mixed Precision Training", ICLR 2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
SMALLEST_SCALE = 2.0**-24  # its inverse must stay finite
STEPS_TO_GROW = 2000  # without an overflow, before the scale doubles


class GradScaler:
    """The loss scale of a run. It is the same on all ranks, because all of them learn of an overflow in the same step."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale if `overflowed` (0-d bool, on the device), and double it after STEPS_TO_GROW steps without
        overflow."""
        good_steps = torch.where(overflowed, 0, self.good_steps + 1)
        grows = good_steps == STEPS_TO_GROW
        self.scale *= torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0))
        self.scale.clamp_(min=SMALLEST_SCALE)
        self.good_steps.copy_(torch.where(grows, 0, good_steps))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.scale.copy_(state["scale"])
        self.good_steps.copy_(state["good_steps"])
