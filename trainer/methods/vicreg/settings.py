"""Settings of VICReg."""

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
class VICRegSettings(WholeBatchSettings):
    """VICReg (Bardes et al., ICLR 2022)."""

    invariance_weight: float = setting(25.0, between=(0, None))
    """Weight of the squared difference between the views of an image."""
    variance_weight: float = setting(25.0, between=(0, None))
    """Weight of the hinge that keeps the standard deviation of each dimension at 1 or more."""
    covariance_weight: float = setting(1.0, between=(0, None))
    """Weight of the squared covariances between different dimensions."""

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the covariance."""
        k = config.model.embedding_size
        return [f"variance and covariance of {k} x {k} dimensions over {config.data.images_per_step} images"]

    def method_class(self) -> Callable[..., Method]:
        """Import and return `VICReg`."""
        from trainer.methods.vicreg.method import VICReg

        return VICReg
