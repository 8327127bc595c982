"""The parts for other programs: the loss as a module, LARS as an optimizer, and views without a config."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

from trainer.data.plan import slice_permutations
from trainer.errors import InputError
from trainer.parts import Lars, ViewsConfig, WMSELoss, parameter_groups, train_views, wmse_loss

K = 4


def embeddings(num_views: int, images: int = 32) -> list[Tensor]:
    torch.manual_seed(0)
    shared = torch.randn(images, K, dtype=torch.float64)
    return [shared + 0.5 * torch.randn_like(shared) for _ in range(num_views)]


@pytest.mark.parametrize(("num_views", "iterations"), [(2, 1), (3, 2), (4, 3)])
def test_the_module_computes_the_loss(num_views: int, iterations: int) -> None:
    views = embeddings(num_views)
    module = WMSELoss(slice_size=16, iterations=iterations, seed=5)
    # Each call permutes the images anew, except in the first iteration.
    for call in range(2):
        expected = wmse_loss(
            torch.cat(views),
            num_views=num_views,
            slice_size=16,
            iterations=iterations,
            permutations=torch.from_numpy(slice_permutations(5, call, 32, iterations, 32)),
            backend="reference",
        )
        torch.testing.assert_close(module(*views), expected, rtol=1e-12, atol=0)
    assert module.failed_slices == 0


def test_a_restored_module_continues_with_the_next_permutations() -> None:
    views = embeddings(2)
    first = WMSELoss(slice_size=16, iterations=2)
    first(*views)
    second = WMSELoss(slice_size=16, iterations=2)
    second.load_state_dict(first.state_dict())
    assert second(*views) == first(*views)


def test_autocast_does_not_change_the_loss() -> None:
    views = [view.float() for view in embeddings(2)]
    module = WMSELoss(slice_size=16)
    expected = module(*views)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(*views) == expected


def test_a_slice_without_variance_does_not_count() -> None:
    views = embeddings(2)
    expected = WMSELoss(slice_size=16)(*(view[:16] for view in views))
    views[0][16:] = 1.0
    module = WMSELoss(slice_size=16)
    torch.testing.assert_close(module(*views), expected)
    assert module.failed_slices == 1


@pytest.mark.parametrize("shapes", [[(32, 4)], [(32, 4), (16, 4)], [(20, 4), (20, 4)], [(32, 16), (32, 16)]])
def test_sizes_that_do_not_fit_are_refused(shapes: list[tuple[int, int]]) -> None:
    with pytest.raises(InputError):
        WMSELoss(slice_size=16)(*(torch.randn(shape) for shape in shapes))


def weight_gradient(inputs: list[Tensor], module: WMSELoss, wrap: bool) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of a linear layer whose outputs are the embeddings."""
    torch.manual_seed(1)
    layer = nn.Linear(K, K, bias=False, dtype=torch.float64)
    model = nn.parallel.DistributedDataParallel(layer) if wrap else layer
    loss = module(*model(torch.cat(inputs)).chunk(len(inputs)))
    loss.backward()
    assert layer.weight.grad is not None
    return loss.detach(), layer.weight.grad


def _rank(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    # Slices of 32 images span the two ranks with 16 images each.
    local = [view.chunk(2)[rank] for view in embeddings(3)]
    result = weight_gradient(local, WMSELoss(slice_size=32, iterations=2), wrap=True)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_under_ddp_equal_one_process(tmp_path: Path) -> None:
    processes.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    expected = weight_gradient(embeddings(3), WMSELoss(slice_size=32, iterations=2), wrap=False)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, rtol=1e-11, atol=1e-14)


def test_lars_takes_plain_parameters_a_scheduler_and_a_closure() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Lars(model.parameters(), lr=0.5, momentum=0.0, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for rate in (0.5, 0.25):
        weight = model.weight.detach().clone()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            return loss

        closure()
        assert model.weight.grad is not None
        direction = model.weight.grad + 0.1 * weight
        trust = 1e-3 * weight.norm() / direction.norm()
        assert optimizer.step(closure) > 0
        schedule.step()
        torch.testing.assert_close(model.weight, weight - rate * trust * direction)


def test_groups_leave_biases_without_decay_and_adaptation() -> None:
    model = nn.Linear(3, 2)
    optimizer = Lars(parameter_groups(model, weight_decay=0.1), lr=0.5, momentum=0.0)
    bias = model.bias.detach().clone()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.bias, bias - 0.5 * 4)


def test_views_need_no_config_and_resume(tiny_set: Path) -> None:
    recipe = ViewsConfig(num_views=2, size=32, blur_probability=0.0)
    loader = train_views(tiny_set, recipe, images_per_step=16, threads=1)
    batches = [(batch.views.clone(), batch.image_ids) for batch in loader]
    assert len(batches) == 3
    assert batches[0][0].shape == (2 * 16, 3, 32, 32)
    assert set(np.concatenate([ids for _, ids in batches])) == set(range(48))
    assert set(loader.index.labels[batches[0][1]]) <= {0, 1}
    resumed = train_views(tiny_set, recipe, images_per_step=16, threads=1, first_step=2, end_step=4)
    views = [batch.views.clone() for batch in resumed]
    assert torch.equal(views[0], batches[2][0])
    assert len(views) == 2
    with pytest.raises(InputError, match="has 48 images in train: set images_per_step to 48 or less"):
        train_views(tiny_set, recipe, images_per_step=64)


def test_wrong_arguments_of_the_loss_are_explained() -> None:
    with pytest.raises(InputError, match="takes the views one by one"):
        WMSELoss(slice_size=16)(embeddings(2))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="iterations is 0"):
        WMSELoss(slice_size=16, iterations=0)
