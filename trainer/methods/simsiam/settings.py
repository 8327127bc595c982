"""Settings of SimSiam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.setting import setting
from trainer.methods.settings import MethodSettings

if TYPE_CHECKING:
    from trainer.methods.method import Method


@dataclass(frozen=True)
class SimSiamSettings(MethodSettings):
    """SimSiam (Chen and He, CVPR 2021)."""

    predictor_hidden: int = setting(512, between=(1, None))
    """Hidden size of the predictor, a quarter of the embedding size in the paper."""
    constant_predictor_rate: bool = True
    """Keep the learning rate of the predictor at the peak in every step, instead of following the schedule."""

    def method_class(self) -> Callable[..., Method]:
        """Import and return `SimSiam`."""
        from trainer.methods.simsiam.method import SimSiam

        return SimSiam
