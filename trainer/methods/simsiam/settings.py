"""Settings of SimSiam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.setting import setting
from trainer.methods.settings import MethodSettings

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.methods.method import Method


@dataclass(frozen=True)
class SimSiamSettings(MethodSettings):
    """SimSiam (Chen and He, CVPR 2021)."""

    predictor_hidden: int = setting(512, between=(1, None))
    """Hidden size of the predictor, a quarter of the embedding size in the paper."""
    constant_predictor_rate: bool = True
    """Keep the learning rate of the predictor at the peak in every step, instead of following the schedule."""

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the learning rate of the predictor."""
        rate = "stays at the peak" if self.constant_predictor_rate else "follows the schedule"
        return [f"predictor of {self.predictor_hidden} hidden units, whose learning rate {rate}"]

    def method_class(self) -> Callable[..., Method]:
        """Import and return `SimSiam`."""
        from trainer.methods.simsiam.method import SimSiam

        return SimSiam
