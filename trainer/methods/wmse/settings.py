"""The settings of W-MSE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainer.config.setting import setting
from trainer.errors import InputError
from trainer.methods.settings import MethodSettings

if TYPE_CHECKING:
    import torch

    from trainer.config.schema import Config
    from trainer.methods.method import Method


@dataclass(frozen=True)
class WMSESettings(MethodSettings):
    """W-MSE (Ermolov et al., ICML 2021, section 3)."""

    slice_size: int = setting(256, between=(2, None))
    """Rows M of one view that are whitened together. The paper takes twice the embedding size."""
    iterations: int = setting(1, between=(1, None))
    """Number of ways in which the images of a step are cut into slices. Each way after the first permutes the images within
    blocks of permutation_block."""
    permutation_block: int = setting(512, between=(1, None))
    """Number of images that are permuted among themselves for iterations after the first, a multiple of slice_size."""
    normalize: bool = True
    """True: squared distance between L2-normalised rows (0 to 4). False: mean squared Euclidean distance."""
    eps: float = setting(0.0, between=(0, 0.99))
    """Shrinkage of the covariance towards the mean of its diagonal, 0 to 1. The paper takes 0."""
    backend: Literal["auto", "reference", "torch", "triton"] = setting("auto", shapes_result=False)
    """Whitening backend, see kernels/README.md. auto: the fastest one that was measured on such a device."""
    cholesky_float64: bool = False
    """Compute mean, covariance and Cholesky factor in float64, for embeddings with condition numbers above 1e5."""

    def problems(self, config: Config) -> list[str]:
        """Check that slices are taller than the embedding is wide, and that the images divide into slices and blocks."""
        images = config.data.images_per_step
        size = self.slice_size
        k = config.model.embedding_size
        problems = []
        if size <= k:
            problems.append(
                f"wmse.slice_size is {size} with model.embedding_size {k}: a slice needs more rows than columns, else its "
                f"covariance is singular; the paper takes {2 * k}"
            )
        if images % size:
            fits = {max(images // size, 1) * size, -(-images // size) * size}
            problems.append(
                f"data.images_per_step is {images}, not a multiple of wmse.slice_size {size}: "
                f"take {' or '.join(map(str, sorted(fits)))}"
            )
        if self.iterations > 1 and (self.permutation_block % size or images % self.permutation_block):
            problems.append(
                f"wmse.permutation_block is {self.permutation_block}: with wmse.iterations {self.iterations} it must be a "
                f"multiple of wmse.slice_size {size} and divide data.images_per_step {images}; take {images}"
            )
        return problems

    def indivisible_images(self, config: Config) -> int:
        """A slice, or a block within which images are permuted."""
        return self.permutation_block if self.iterations > 1 else self.slice_size

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the slices of a step."""
        slices = config.data.images_per_step // self.slice_size * config.views.num_views * self.iterations
        return [f"whitening: {slices} slices of {self.slice_size} x {config.model.embedding_size} a step"]

    def check_device(self, config: Config, device: torch.device) -> None:
        """Raise InputError if the whitening backend can't do on this device what the settings ask for."""
        from kernels.backends import why_not

        reason = why_not(self.backend, device.type, config.model.embedding_size, self.cholesky_float64)
        if reason:
            raise InputError(f"wmse.backend {self.backend} {reason}: set wmse.backend to auto or torch")

    def method_class(self) -> Callable[..., Method]:
        """Import and return `WMSE`."""
        from trainer.methods.wmse.method import WMSE

        return WMSE
