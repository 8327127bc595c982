"""Settings of BYOL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainer.config.setting import setting
from trainer.methods.settings import MethodSettings

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.methods.method import Method


@dataclass(frozen=True)
class BYOLSettings(MethodSettings):
    """BYOL (Grill et al., NeurIPS 2020)."""

    predictor_hidden: int = setting(1024, between=(1, None))
    """Hidden size of the predictor, which has the form of the projector. BYOL uses 4096 on ImageNet."""
    momentum: float = setting(0.99, between=(0, 1))
    """Momentum of the target network in the first step: the share of its weights that an update keeps."""
    momentum_schedule: Literal["cosine", "constant"] = "cosine"
    """cosine: the momentum rises to 1 at the end of the run, by step. constant: it stays the same."""
    normalize: bool = True
    """True: the distance of two embeddings is 2 - 2 cos. False: the mean squared difference of their elements."""

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the target network."""
        last = "1 at the end" if self.momentum_schedule == "cosine" else "the same"
        return [f"target network: momentum {self.momentum:g} at the start, {last}"]

    def method_class(self) -> Callable[..., Method]:
        """Import and return `BYOL`."""
        from trainer.methods.byol.method import BYOL

        return BYOL
