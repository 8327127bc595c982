"""Parts of this program for other programs: loss, whitening, optimizer, plan and views. docs/parts.md shows their use.

Shapes: d views, N images of this rank, R ranks, k embedding size, S size of a view in pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.whitening import whiten, whiten_with_status
from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.index import Index, open_images
from trainer.data.loader import Batch, ViewLoader, train_requests
from trainer.data.plan import Planner, slice_permutations
from trainer.distributed.gather import gather_candidates, gather_rows
from trainer.distributed.geometry import images_of_rank
from trainer.distributed.ranks import ImageRange, find_ranks
from trainer.errors import InputError
from trainer.losses.wmse import wmse_loss, wmse_loss_with_status
from trainer.models.encoder import Normalize
from trainer.optimizer import Lars, parameter_groups

__all__ = [
    "Batch",
    "ImageRange",
    "Index",
    "Lars",
    "Normalize",
    "Planner",
    "ViewsConfig",
    "WMSELoss",
    "gather_candidates",
    "gather_rows",
    "parameter_groups",
    "train_views",
    "whiten",
    "whiten_with_status",
    "wmse_loss",
    "wmse_loss_with_status",
]


class WMSELoss(nn.Module):
    """W-MSE loss of the views of a batch (Ermolov et al., ICML 2021, equations 4-6), in float32 also inside of autocast.

    Under torch.distributed the slices are cut from the images of all ranks, and the gradient is exact if the gradients of the
    weights are averaged over ranks, as DistributedDataParallel does. Every rank must have the same number of images."""

    def __init__(
        self,
        slice_size: int = 128,
        *,
        iterations: int = 1,
        normalize: bool = True,
        eps: float = 0.0,
        whitening: str = "cholesky",
        gather: bool = True,
        group: Any = None,
        seed: int = 0,
    ) -> None:
        """slice_size: number M of images whose embeddings are whitened together; twice the embedding size in the paper.

        iterations: number of ways to cut the images into slices. The first takes them in the order in which they come; the
            others permute them by `seed` and the number of calls, so that all ranks permute alike.
        normalize: see `wmse_loss`. eps, whitening: see `whiten`.
        gather: False: each rank cuts slices from its own images only, which must be a multiple of slice_size.
        group: process group that gathers; None is all ranks.
        """
        super().__init__()
        if iterations < 1:
            raise InputError(f"iterations is {iterations}: W-MSE needs at least 1")
        if not 0 <= eps < 1:
            raise InputError(f"eps is {eps}: give a share of shrinkage from 0 to below 1")
        self.slice_size = slice_size
        self.iterations = iterations
        self.options: dict[str, Any] = {
            "normalize": normalize,
            "eps": eps,
            "whitening": whitening,
        }
        self.gather = gather
        self.group = group
        self.seed = seed
        # Each call permutes the images in another way.
        self.calls = 0
        """Number of calls so far, which state_dict keeps for the permutations of a resumed run."""
        self.failed_slices: Tensor | None = None
        """Number of slices of the last call that could not be whitened and do not count, 0-d on the device."""

    def forward(self, *views: Tensor) -> Tensor:
        """Compute the loss, a scalar. views: d tensors (N, k), row i of each from image i.

        Raises InputError for sizes that do not fit."""
        # A list of views is an easy mistake.
        if not all(isinstance(view, Tensor) for view in views):
            raise InputError("WMSELoss takes the views one by one: loss(first, second), or loss(*views) for a list")
        # Views of other shapes would be joined to slices that mix images.
        shapes = [tuple(view.shape) for view in views]
        if len(views) < 2 or len(set(shapes)) != 1:
            found = ", ".join(map(str, shapes))
            raise InputError(f"WMSELoss needs two or more views of equal shape (images, embedding size), got: {found}")
        # View-major, as the loss expects it.
        v = torch.cat(views)
        # Gathering keeps the gradients: each rank gets those of its own rows.
        if self.gather and dist.is_initialized() and dist.get_world_size(self.group) > 1:
            v = gather_rows(v, len(views), self.group)
        num_images = len(v) // len(views)
        # The permutations stay inside of blocks, of which there is one here.
        orders = slice_permutations(self.seed, self.calls, num_images, self.iterations, block=num_images)
        self.calls += 1
        loss, status = wmse_loss_with_status(
            v,
            num_views=len(views),
            slice_size=self.slice_size,
            iterations=self.iterations,
            permutations=torch.from_numpy(orders).to(v.device, non_blocking=True),
            **self.options,
        )
        # The number stays on the device, so that the caller decides when to wait for it.
        self.failed_slices = (~status.ok).sum()
        return loss

    def get_extra_state(self) -> dict[str, int]:
        """Return what a state dict keeps."""
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restore what `get_extra_state` returned."""
        self.calls = state["calls"]


def train_views(
    root: str | Path,
    recipe: ViewsConfig | None = None,
    *,
    split: str = "train",
    images_per_step: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    first_step: int = 0,
    end_step: int | None = None,
    threads: int = 0,
) -> ViewLoader:
    """Return an iterable of `Batch`: the views of each training step, decoded and augmented by DALI.

    A batch holds views (d*N, 3, S, S) uint8, view-major, and image_ids (N,). The same seed gives the same views on any
    number of ranks, and after a restart with first_step. Labels: `loader.index.labels[batch.image_ids]`.
    The next batch overwrites the views.

    root, split: an image folder, or tar shards, as docs/data.md describes. recipe: None: the default recipe of ImageNet.
    images_per_step: global batch size, which the ranks (of torchrun or srun) divide among them.
    first_step, end_step: the steps to return, counted over all epochs; end_step None: to the end of the first epoch.
    threads: CPU threads of this rank; 0: all that it may use.

    Raises InputError if the images cannot be read, or if the ranks do not divide images_per_step."""
    # The loader reads its settings from the same dataclasses as a run.
    if images_per_step < 1 or first_step < 0:
        raise InputError(
            f"images_per_step is {images_per_step} and first_step {first_step}: give at least 1 image and step 0 or later"
        )
    recipe = recipe or ViewsConfig()
    data = DataConfig(
        root=str(root),
        train_split=split,
        images_per_step=images_per_step,
        threads=threads,
    )
    index = open_images(data, split)
    # The ranks come from the launcher, as in a run.
    ranks = find_ranks()
    images = images_of_rank(ranks, images_per_step)
    planner = Planner(
        recipe,
        seed=seed,
        num_images=len(index),
        images_per_step=images_per_step,
        images=images,
    )
    # Only full batches are steps.
    if not planner.steps_per_epoch:
        raise InputError(f"{root} has {len(index)} images in {split}: set images_per_step to {len(index)} or less")
    # Steps count over all epochs, so the end of the first one is their number in an epoch.
    if end_step is None:
        end_step = planner.steps_per_epoch
    return ViewLoader(
        index,
        recipe,
        data,
        train_requests(planner),
        batch_size=images.count,
        device=torch.device(device),
        first_step=first_step,
        end_step=end_step,
        rank=ranks.rank,
    )
