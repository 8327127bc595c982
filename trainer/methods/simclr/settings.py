"""Settings of SimCLR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.setting import setting
from trainer.methods.settings import WholeBatchSettings
from trainer.methods.wmse.settings import slice_problems

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer.config.schema import Config
    from trainer.methods.method import Method


@dataclass(frozen=True)
class SimCLRSettings(WholeBatchSettings):
    """SimCLR's contrastive loss (Chen et al., ICML 2020), as the W-MSE paper compares with it (equation InfoNCE)."""

    temperature: float = setting(0.5, between=(1e-3, None))
    """Temperature by which similarities are divided. The W-MSE paper uses 0.5, and 1 without normalize."""
    normalize: bool = True
    """True: compare embeddings by their cosine. False: compare them by their dot product."""
    scale: float = setting(1.0, between=(1e-9, None))
    """Factor of the loss. SimCLR's code adds both directions of a pair of views, whose mean this loss is: 2 gives its value."""
    whiten: bool = False
    """Whiten the embeddings as W-MSE does, in slices of neighbouring images of one view, before they are compared."""
    slice_size: int = setting(256, between=(2, None))
    """Number of rows of one view that are whitened together (only with whiten). W-MSE uses twice the embedding size."""

    def problems(self, config: Config) -> list[str]:
        """Check that there are negatives, and that slices have more rows than columns and divide the images evenly."""
        if self.whiten:
            return slice_problems(config, "simclr.slice_size", self.slice_size)
        return super().problems(config)

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the number of negatives."""
        images = config.data.images_per_step
        views = config.views.num_views
        # The negatives of an embedding are the other images in both views of a pair.
        num_pairs = views * (views - 1) // 2
        pairs = f", averaged over {num_pairs} pairs of views" if views > 2 else ""
        lines = [f"contrastive loss: 1 positive and {2 * images - 2} negatives for each embedding{pairs}"]
        if self.whiten:
            slices = images // self.slice_size * views
            lines.append(
                f"whitening: {slices} slices of {self.slice_size} x {config.model.embedding_size} in each step"
            )
        return lines

    def slices(self, config: Config, step: int) -> NDArray[np.int64] | None:
        """Return the rows of each slice: neighbouring images."""
        from trainer.data.plan import slice_permutations

        if not self.whiten:
            return None
        images = config.data.images_per_step
        return slice_permutations(config.seed, step, images, 1, images).reshape(1, -1, self.slice_size)

    def method_class(self) -> Callable[..., Method]:
        """Import and return `SimCLR`."""
        from trainer.methods.simclr.method import SimCLR

        return SimCLR
