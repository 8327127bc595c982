"""Two ranks that share slices have the same gradients as one process on the joined batch."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.processes import start_ranks
from trainer.distributed.gather import gather_rows
from trainer.errors import InputError
from trainer.losses.wmse import draw_permutations, wmse_loss

RANKS, IMAGES_PER_RANK, FEATURES, SIZE, SLICE_SIZE = 2, 6, 7, 4, 12
VIEWS = (2, 3, 4)


def inputs(num_views: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the joined batch (num_views, images, features), an encoder's weights (features, size), and permutations."""
    generator = torch.Generator().manual_seed(num_views)
    images = RANKS * IMAGES_PER_RANK
    batch = torch.randn(num_views, images, FEATURES, dtype=torch.float64, generator=generator)
    weights = torch.randn(FEATURES, SIZE, dtype=torch.float64, generator=generator)
    return batch, weights, draw_permutations(2, images, torch.device("cpu"), generator)


def loss_of(v: Tensor, num_views: int, permutations: Tensor) -> Tensor:
    return wmse_loss(v, num_views=num_views, slice_size=SLICE_SIZE, iterations=2, permutations=permutations)


def run_rank(folder: str) -> None:
    """Compute embeddings and gradient on this rank, and save them for each number of views."""
    rank = int(os.environ["RANK"])
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results = {}
    for num_views in VIEWS:
        batch, weights, permutations = inputs(num_views)
        mine = batch[:, rank * IMAGES_PER_RANK : (rank + 1) * IMAGES_PER_RANK].flatten(0, 1)
        weights.requires_grad_()
        v = gather_rows(mine @ weights, num_views, None)
        (gradient,) = torch.autograd.grad(loss_of(v, num_views, permutations), weights)
        dist.all_reduce(gradient)
        results[num_views] = (v.detach(), gradient / RANKS)  # the mean over ranks, as in DDP
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("gather")
    for process in start_ranks(run_rank, [str(folder)], folder, RANKS):
        assert process.wait() == 0, process.output()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("num_views", VIEWS)
def test_two_ranks_equal_one_process_on_the_joined_batch(ranks, num_views):
    batch, weights, permutations = inputs(num_views)
    weights.requires_grad_()
    v = batch.flatten(0, 1) @ weights
    (gradient,) = torch.autograd.grad(loss_of(v, num_views, permutations), weights)
    for rank in ranks:
        torch.testing.assert_close(rank[num_views], (v.detach(), gradient), rtol=1e-10, atol=1e-12)


def test_rows_must_be_whole_views():
    with pytest.raises(InputError, match="3 views"):
        gather_rows(torch.zeros(8, 4), 3, None)
