"""Settings of Barlow Twins."""

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
class BarlowTwinsSettings(WholeBatchSettings):
    """Barlow Twins (Zbontar et al., ICML 2021)."""

    off_diagonal_weight: float = setting(0.0051, between=(0, None))
    """Weight of the squared correlations between different dimensions."""
    scale: float = setting(1.0, between=(1e-9, None))
    """Factor of the whole loss. It matters for optimizers whose update depends on the size of the gradient."""

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the correlation."""
        k = config.model.embedding_size
        return [f"correlation of {k} x {k} dimensions over {config.data.images_per_step} images"]

    def method_class(self) -> Callable[..., Method]:
        """Import and return `BarlowTwins`."""
        from trainer.methods.barlow_twins.method import BarlowTwins

        return BarlowTwins
