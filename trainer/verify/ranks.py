"""Group `ranks`: several ranks compute what one process computes from all images: losses, gradients, statistics.

All ranks make each check together. The expected values come from a step without ranks in the same process, and for the
collectives from plain definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.schema import Config
from trainer.distributed.gather import gather_candidates, gather_rows, sum_of_group
from trainer.distributed.process_group import make_batch_norm_group, wrap_model
from trainer.distributed.ranks import Ranks
from trainer.models.batch_norm import convert_batch_norm
from trainer.verify.check import Item, Measured, Place, draw_normal, largest_relative
from trainer.verify.training import draw_pixels, tiny_config, train_step

_IMAGES = 16  # of each rank
_K = 4
_FLOAT64 = 1e-8


def ranks_items(place: Place) -> Iterator[Item]:
    """Yield the checks that all ranks make together."""
    world_size = place.ranks.world_size
    yield "gathered rows, loss of all rows on every rank", partial(_gather, place, _loss_of_joined_rows)
    yield "gathered candidates, loss of the own rows", partial(_gather, place, _loss_of_own_rows)
    yield "sums over ranks", partial(_gather, place, _loss_of_sums)
    # The program normalises all views together, or each view by itself.
    for num_views in (1, 2):
        parts = "each view alone" if num_views > 1 else "all views together"
        yield f"BatchNorm over ranks, {parts}", partial(_batch_norm, place, num_views)
    # The losses, statistics or queues of every method need the images of all ranks.
    images = _IMAGES * world_size
    steps = {
        "wmse, slices inside a rank": tiny_config("wmse", images, 2, iterations=2),
        "wmse, a slice over all ranks": tiny_config("wmse", images, 4, slice_size=images, per_view=True),
        "simclr": tiny_config("simclr", images, 3, per_view=True),
        "simclr, whitened": tiny_config("simclr", images, 2, slice_size=images, whiten=True),
        "byol": tiny_config("byol", images),
        "simsiam": tiny_config("simsiam", images),
        "moco": tiny_config("moco", images),
        "swav": tiny_config("swav", images),
        "align_uniform": tiny_config("align_uniform", images),
        "barlow_twins": tiny_config("barlow_twins", images),
        "vicreg": tiny_config("vicreg", images),
    }
    for name, config in steps.items():
        yield f"training step over DDP, {name}", partial(_step, place, config)


# --- collectives ---


def _rows_of_rank(v: Tensor, place: Place, num_views: int) -> Tensor:
    """Return this rank's rows of v (d*N*R, k), view-major."""
    by_rank = v.unflatten(0, (num_views, place.ranks.world_size, -1))
    return by_rank[:, place.ranks.rank].flatten(0, 1)


def _draw(place: Place, num_views: int, seed: int) -> Tensor:
    """Draw the inputs of all ranks, (d*N*R, k) float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    count = num_views * _IMAGES * place.ranks.world_size
    return draw_normal(generator, count, _K).to(place.device)


# Each loss is arbitrary, and differs for every row. Its factor depends on the place of a row among all rows.


def _factors(count: int, device: torch.device) -> Tensor:
    return torch.linspace(1, 2, count, dtype=torch.float64, device=device)[:, None]


def _loss_of_joined_rows(v: Tensor, place: Place) -> Tensor:
    # A process without ranks has all rows already.
    joined = gather_rows(v, 2, None) if place.ranks.world_size > 1 else v
    return (_factors(len(joined), v.device) * joined.sin()).mean()


def _loss_of_own_rows(v: Tensor, place: Place) -> Tensor:
    """Compare the own rows with all rows, so that each row is in the losses of all ranks."""
    has_ranks = place.ranks.world_size > 1
    candidates = gather_candidates(v, 2, None) if has_ranks else v
    factors = _factors(len(candidates), v.device)
    own_factors = _rows_of_rank(factors, place, 2) if has_ranks else factors
    products = v @ (factors * candidates).T
    return (own_factors * products.sin()).mean()


def _loss_of_sums(v: Tensor, place: Place) -> Tensor:
    total = v.square().sum(0)
    if place.ranks.world_size > 1:
        total = sum_of_group(total, dist.group.WORLD)
    factors = _factors(_K, v.device)[:, 0]
    return (total.sqrt() * factors).sum()


def _gather(place: Place, loss_of: Callable[[Tensor, Place], Tensor]) -> Measured:
    """Compare the gradient of shared weights, averaged over ranks by DDP, with that of one process."""
    inputs = _draw(place, 2, seed=0)
    own = _rows_of_rank(inputs, place, 2)
    found = []
    for ranks, x in ((place.ranks, own), (Ranks(), inputs)):
        layer = nn.Linear(_K, _K, bias=False, device=place.device, dtype=torch.float64)
        weight = torch.linspace(-1, 1, _K * _K, dtype=torch.float64).view(_K, _K)
        with torch.no_grad():
            layer.weight.copy_(weight + torch.eye(_K))
        wrapped = wrap_model(layer, ranks, place.device)
        loss = loss_of(wrapped(x), Place(place.device, ranks, place.folder))
        loss.backward()
        # The backward pass has averaged the gradient over the ranks. The loss is still that of this rank.
        value = loss.detach().clone()
        if ranks.world_size > 1:
            dist.all_reduce(value)
        assert layer.weight.grad is not None
        found.append((value / ranks.world_size, layer.weight.grad.clone()))
    pairs = zip(*found, strict=True)
    return Measured(largest_relative(pairs), _FLOAT64)


def _batch_norm(place: Place, num_views: int) -> Measured:
    """Compare output, gradients and running statistics with torch's BatchNorm of the joined rows of each view."""
    ranks = place.ranks
    config = tiny_config("wmse", _IMAGES * ranks.world_size)
    group = make_batch_norm_group(config, ranks, place.device)
    # The spread grows from row to row, so that the ranks and views have different statistics.
    white = _draw(place, num_views, seed=1)
    factors = _factors(len(white), place.device)
    x = 3 + white * (2 * factors) ** 3

    # torch's BatchNorm sees the views one after the other.
    plain_norm: Any = nn.BatchNorm1d(_K).double().to(place.device)
    joined = x.clone().requires_grad_()
    y = torch.cat([plain_norm(view) for view in joined.chunk(num_views)])
    joined_loss = (factors * y.sin()).sum()
    (joined_gradient,) = torch.autograd.grad(joined_loss, joined)

    # The program's BatchNorm sees only the rows of this rank.
    to_convert = nn.Sequential(nn.BatchNorm1d(_K).double().to(place.device))
    norm = convert_batch_norm(to_convert, num_views, group, ranks.world_size)
    own = _rows_of_rank(x, place, num_views).clone().requires_grad_()
    own_y = norm(own)
    own_loss = (_rows_of_rank(factors, place, num_views) * own_y.sin()).sum()
    (own_gradient,) = torch.autograd.grad(own_loss, own)

    layer: Any = norm[0]  # type: ignore[index]
    pairs = [
        (own_y, _rows_of_rank(y, place, num_views)),
        (own_gradient, _rows_of_rank(joined_gradient, place, num_views)),
        (layer.running_mean, plain_norm.running_mean),
        (layer.running_var, plain_norm.running_var),
    ]
    return Measured(largest_relative(pairs), _FLOAT64)


# --- steps ---


def _step(place: Place, config: Config) -> Measured:
    """Compare a step of all ranks with a step of one process on the joined batch."""
    ours = _update_of(config, place.ranks, place.device)
    expected = _update_of(config, Ranks(), place.device)
    if ours.keys() != expected.keys():
        only_in_one = sorted(ours.keys() ^ expected.keys())
        raise ValueError(f"the networks differ in {only_in_one[:3]}")
    pairs = [(ours[name], expected[name]) for name in expected]
    return Measured(largest_relative(pairs), _FLOAT64)


def _update_of(config: Config, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Make one update with SGD and rate 1. Returns the loss, the gradients of all weights, and the buffers after it.

    Gradients are joined to one vector, because some are 0 but for rounding."""
    step = train_step(config, ranks, device)
    networks = step.method.networks
    before = [p.detach().clone() for p in networks.parameters()]
    # All ranks draw the same pixels, of which each takes those of its images.
    first = step.images.first
    by_view = draw_pixels(config, device).unflatten(0, (config.views.num_views, -1))
    own = by_view[:, first : first + step.images.count].flatten(0, 1)
    result = step(own.contiguous(memory_format=torch.channels_last), 0, 1.0)
    if bool(result.skipped):
        raise ValueError("the update was skipped")
    loss = result.loss.clone()
    if ranks.world_size > 1:
        dist.all_reduce(loss)
    # With plain SGD and rate 1, the change of a weight is its gradient.
    gradients = []
    for old, p in zip(before, networks.parameters(), strict=True):
        gradients.append((old - p.detach()).flatten())
    if config.model.batch_norm_ranks == "all":
        buffers = {name: b.clone() for name, b in networks.named_buffers() if "running" in name}
    else:
        # Groups of rows that lie on one rank move the statistics of that rank only.
        buffers = {"queue": networks.get_buffer("queue").clone()}
    return {
        "loss": loss / ranks.world_size,
        "gradients": torch.cat(gradients),
        **buffers,
    }
