"""Settings of alignment and uniformity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.setting import setting
from trainer.methods.moco.settings import QueueSettings

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.methods.method import Method


@dataclass(frozen=True)
class AlignUniformSettings(QueueSettings):
    """Alignment and uniformity with a queue (Wang and Isola, ICML 2020)."""

    align_weight: float = setting(3.0, between=(0, None))
    """Weight of the alignment, the mean squared distance of a query to its key."""
    uniform_weight: float = setting(1.0, between=(0, None))
    """Weight of the uniformity of the queries, among each other and against the queue."""
    uniform_t: float = setting(3.0, between=(1e-3, None))
    """Sharpness t of the uniformity, log of the mean of exp(-t distance^2)."""

    def indivisible_images(self, config: Config) -> int:
        """Return the global batch size, because the uniformity takes all pairs of queries."""
        return config.data.images_per_step

    def method_class(self) -> Callable[..., Method]:
        """Import and return `AlignUniform`."""
        from trainer.methods.align_uniform.method import AlignUniform

        return AlignUniform
