"""Settings of W-MSE."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainer.config.setting import setting
from trainer.errors import InputError
from trainer.methods.settings import MethodSettings

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from trainer.config.schema import Config
    from trainer.methods.method import Method


def slice_problems(config: Config, key: str, size: int, is_whitened: bool = True) -> list[str]:
    """Check that slices of `size` rows divide the images of a step, and have more rows than columns if they are whitened.

    key: name of the setting that holds the size."""
    images = config.data.images_per_step
    k = config.model.embedding_size
    problems = []
    if is_whitened and size <= k:
        problems.append(
            f"{key} is {size} with model.embedding_size {k}: a slice needs more rows than columns, since its covariance is "
            f"singular otherwise; set {key} above {k}, the paper uses {2 * k}"
        )
    # Propose the multiples of the slice size next to the given number.
    if images % size:
        below = max(images // size, 1) * size
        above = math.ceil(images / size) * size
        nearest = " or ".join(str(n) for n in sorted({below, above}))
        problems.append(
            f"data.images_per_step is {images}, not a multiple of {key} {size}: set it to {nearest}, or {key} to a divisor "
            "of it"
        )
    return problems


@dataclass(frozen=True)
class WMSESettings(MethodSettings):
    """W-MSE (Ermolov et al., ICML 2021, section 3)."""

    whitening: Literal["cholesky", "zca", "standardise"] = "cholesky"
    """Transform of the rows of a slice. cholesky: the paper's whitening. zca: whitening by the symmetric inverse root of the
    covariance. standardise: mean 0 and variance 1 of each dimension, as BatchNorm; dimensions stay correlated."""
    slice_size: int = setting(256, between=(2, None))
    """Number M of rows of one view that are whitened together. The paper uses twice the embedding size."""
    iterations: int = setting(1, between=(1, None))
    """Number of ways to cut the images of a step into slices. Each way after the first permutes the images within blocks of
    permutation_block."""
    permutation_block: int = setting(512, between=(1, None))
    """Number of images that are permuted among themselves for iterations after the first, a multiple of slice_size."""
    normalize: bool = True
    """True: compare L2-normalised rows by their squared distance (0 to 4). False: compare the whitened rows by the mean
    squared difference of their elements."""
    eps: float = setting(0.0, between=(0, 0.99))
    """Shrink the covariance towards the mean of its diagonal by this share, 0 to 0.99. The paper uses 0."""
    backend: Literal["auto", "reference", "torch", "triton", "triton_4_warps"] = setting("auto", shapes_result=False)
    """Whitening backend, see kernels/README.md. auto: torch. `wmse tune` measures the others."""
    cholesky_float64: bool = False
    """Compute mean, covariance and Cholesky factor in float64, for embeddings with condition numbers above 1e5. Only with
    whitening cholesky."""

    def problems(self, config: Config) -> list[str]:
        """Check that a slice has more rows than columns, and that the images divide evenly into slices and blocks."""
        images = config.data.images_per_step
        size = self.slice_size
        is_whitened = self.whitening != "standardise"
        problems = slice_problems(config, "wmse.slice_size", size, is_whitened)
        # Only the Cholesky whitening has Triton kernels and a factor in float64.
        if self.whitening != "cholesky":
            if self.backend.startswith("triton"):
                problems.append(
                    f"wmse.backend is {self.backend} with wmse.whitening {self.whitening}: its kernels only compute cholesky, "
                    "set the backend to auto"
                )
            if self.cholesky_float64:
                problems.append(
                    f"wmse.cholesky_float64 is true with wmse.whitening {self.whitening}, which has no Cholesky factor: set "
                    "it to false"
                )
        # Blocks hold whole slices, and the images of a step whole blocks.
        if self.iterations > 1 and (self.permutation_block % size or images % self.permutation_block):
            problems.append(
                f"wmse.permutation_block is {self.permutation_block}: with wmse.iterations {self.iterations} it must be a "
                f"multiple of wmse.slice_size {size} and divide data.images_per_step {images}; set it to {images}"
            )
        return problems

    def indivisible_images(self, config: Config) -> int:
        """Return the size of a slice, or of a block within which images are permuted."""
        return self.permutation_block if self.iterations > 1 else self.slice_size

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the slices of a step."""
        slices_of_view = config.data.images_per_step // self.slice_size
        slices = slices_of_view * config.views.num_views * self.iterations
        sizes = f"{slices} slices of {self.slice_size} x {config.model.embedding_size} in each step"
        return [f"whitening ({self.whitening}): {sizes}" if self.whitening != "cholesky" else f"whitening: {sizes}"]

    def slices(self, config: Config, step: int) -> NDArray[np.int64]:
        """Return the rows of each slice in each iteration."""
        from trainer.data.plan import slice_permutations

        images = config.data.images_per_step
        orders = slice_permutations(config.seed, step, images, self.iterations, self.permutation_block)
        return orders.reshape(self.iterations, -1, self.slice_size)

    def check_device(self, config: Config, device: torch.device) -> None:
        """Raise InputError if the whitening backend does not support these settings on this device."""
        from kernels.backends import why_not

        reason = why_not(self.backend, device.type, config.model.embedding_size, self.cholesky_float64)
        if reason:
            raise InputError(f"wmse.backend {self.backend} {reason}: set wmse.backend to auto or torch")

    def method_class(self) -> Callable[..., Method]:
        """Import and return `WMSE`."""
        from trainer.methods.wmse.method import WMSE

        return WMSE
