"""Base of the settings of a method. Needs no torch, so that `wmse launch` can check a run on a login node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from trainer.config.schema import Config
    from trainer.distributed.ranks import Ranks
    from trainer.methods.method import Method


@dataclass(frozen=True)
class MethodSettings:
    """Base of the config section of a method. The section's name in `Config` is the method's name."""

    def problems(self, config: Config) -> list[str]:
        """Return the problems of the settings, each with its key, its value and a fix."""
        return []

    def warnings(self, config: Config, total_steps: int) -> list[str]:
        """Describe settings that are allowed but probably unintended. total_steps: updates of the whole run."""
        return []

    def indivisible_images(self, config: Config) -> int:
        """Return the number of images of a step that the loss needs together.

        They are never split over micro-batches. If a rank holds fewer, neighbouring ranks form a loss group, and
        each of them computes the loss of the group's images."""
        return 1

    def images_of_block(self) -> int:
        """Return the number of images of which every rank must hold a multiple. 1: the method asks for none."""
        return 1

    def rows_of_statistics(self) -> int:
        """Return the number of rows of which BatchNorm takes statistics, if the method fixes it. 0: the model's settings do."""
        return 0

    def plan_lines(self, config: Config) -> list[str]:
        """Describe what the method does in a step, for the log and the dry run."""
        return []

    def slices(self, config: Config, step: int) -> NDArray[np.int64] | None:
        """Return the rows of a step that are whitened together, (iterations, slices, rows of a slice); None: none are."""
        return None

    def check_device(self, config: Config, device: torch.device) -> None:
        """Raise InputError if the method does not support these settings on this device. Called before any file is read."""

    def method_class(self) -> Callable[..., Method]:
        """Import and return the class of the method, which may import torch."""
        raise NotImplementedError(f"{type(self).__name__} must override method_class")

    def build(
        self,
        config: Config,
        ranks: Ranks,
        device: torch.device,
        **options: Any,
    ) -> Method:
        """Build the method, with the seed's initial weights, on `device`. options: the other fields of `MethodContext`."""
        from trainer.methods.method import MethodContext

        context = MethodContext(config, ranks, device, **options)
        return self.method_class()(context)


@dataclass(frozen=True)
class WholeBatchSettings(MethodSettings):
    """Base of the settings of a method whose loss compares all images of a step with each other."""

    def problems(self, config: Config) -> list[str]:
        """Refuse a step of one image."""
        if config.data.images_per_step > 1:
            return []
        return [
            f"data.images_per_step is 1, but {config.method} compares the images of a step with each other: set it to 2 or more"
        ]

    def indivisible_images(self, config: Config) -> int:
        """Return the global batch size."""
        return config.data.images_per_step
