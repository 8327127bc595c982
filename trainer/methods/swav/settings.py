"""Settings of SwAV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.setting import setting
from trainer.methods.settings import WholeBatchSettings

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.methods.method import Method


@dataclass(frozen=True)
class SwAVSettings(WholeBatchSettings):
    """SwAV without multi-crop (Caron et al., NeurIPS 2020)."""

    prototypes: int = setting(3000, between=(2, None))
    """Number of prototypes."""
    temperature: float = setting(0.1, between=(1e-3, None))
    """Temperature by which scores are divided in a prediction."""
    epsilon: float = setting(0.05, between=(0.012, None))
    """Smoothness of the assignments. Below 0.012, exp(1 / epsilon) exceeds float32."""
    sinkhorn_iterations: int = setting(3, between=(1, None))
    """Number of Sinkhorn iterations, each with one small all-reduce over ranks."""
    freeze_prototypes_steps: int = setting(313, between=(0, None))
    """Number of steps at the start in which the prototypes are not updated."""

    def warnings(self, config: Config, total_steps: int) -> list[str]:
        """Warn if images cannot reach all prototypes, or if these never learn."""
        images = config.data.images_per_step
        lines = []
        if self.prototypes > images:
            lines.append(
                f"swav.prototypes is {self.prototypes}, more than the {images} images of a step, which cannot be shared out "
                f"among them: set it to {images} or less"
            )
        if self.freeze_prototypes_steps >= total_steps:
            lines.append(
                f"swav.freeze_prototypes_steps is {self.freeze_prototypes_steps}, but the run has {total_steps} steps: the "
                "prototypes never learn; set it lower, or optimizer.epochs higher"
            )
        return lines

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the assignments."""
        share = config.data.images_per_step / self.prototypes
        return [f"assignments: {self.prototypes} prototypes, {share:.3g} images of a step for each"]

    def method_class(self) -> Callable[..., Method]:
        """Import and return `SwAV`."""
        from trainer.methods.swav.method import SwAV

        return SwAV
