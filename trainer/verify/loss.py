"""Group `loss`: the losses that training uses, and their gradients, equal the plain definitions in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import WHITENINGS
from kernels.whitening import whiten
from trainer.distributed.device import without_tf32
from trainer.distributed.ranks import Ranks
from trainer.losses.align_uniform import alignment, uniformity
from trainer.losses.barlow_twins import barlow_twins_loss
from trainer.losses.contrastive import contrastive_loss
from trainer.losses.queue_contrast import queue_contrast_loss
from trainer.losses.regression import regression_loss
from trainer.losses.swapped import swapped_prediction_loss
from trainer.losses.vicreg import vicreg_terms
from trainer.losses.wmse import draw_permutations, wmse_loss
from trainer.verify import plain
from trainer.verify.check import EXACT, Item, Measured, Place, largest, relative_error
from trainer.verify.training import draw_pixels, precision_flags, tiny_config, train_step

Loss = Callable[..., Tensor]
_SLICE, _K, _IMAGES = 16, 6, 48  # three slices of each view
_FLOAT64 = 1e-9
_FLOAT32 = 1e-4  # some hundred times the rounding of float32, as the slices have condition numbers of some tens
_CPU = torch.device("cpu")
_RANKS = Ranks()  # one process


def loss_items(place: Place) -> Iterator[Item]:
    """Yield the checks of losses."""
    device = place.device
    for num_views in (2, 4):
        for iterations in (1, 4):
            for whitening in WHITENINGS:
                name = f"W-MSE, {num_views} views, {iterations} iteration{'s' * (iterations > 1)}, {whitening}"
                yield name, partial(_wmse, device, num_views, iterations, {"whitening": whitening})
    yield "W-MSE, Euclidean distance", partial(_wmse, device, 3, 2, {"normalize": False})
    yield "W-MSE, shrinkage eps 0.1", partial(_wmse, device, 2, 1, {"eps": 0.1})
    yield "W-MSE, float32", partial(_wmse, device, 4, 2, {}, torch.float32)
    for whitening in WHITENINGS:
        yield f"gradient by finite differences, {whitening}", partial(_finite_differences, device, whitening)
        yield f"whitened slices have identity covariance, {whitening}", partial(_identity, device, whitening)
        yield f"each view is whitened alone, {whitening}", partial(_alone, device, whitening)
    yield "a slice that cannot be whitened does not count", partial(_failed_slice, device)
    yield "autocast and fast float32 products do not reach the whitening", partial(_precision, device)
    yield "training step, loss and gradients of all weights", partial(_step_gradients, device)
    yield "training step in bf16, loss of its embeddings", partial(_step_in_bf16, device)
    yield "training step in float32, loss, embeddings and last layer", partial(_step_in_float32, device)
    for method, measure in _OTHERS.items():
        yield method, partial(measure, device)


def _rows(count: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw correlated rows (count, k) with a mean, in float64."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(count, _K, dtype=torch.float64, generator=generator)
    mix = torch.randn(_K, _K, dtype=torch.float64, generator=generator) / 2 + 2 * torch.eye(_K)
    return (white @ mix + 1).to(device)


def _gradients(loss: Tensor, *inputs: Tensor) -> Tensor:
    """Return the gradients of all inputs as one vector."""
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, inputs)])


def _compare(ours: Loss, definition: Loss, *inputs: Tensor, bound: float = _FLOAT64) -> Measured:
    """Measure the error of value and gradient. The definition gets the inputs in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    loss = ours(*leaves)
    expected = definition(*exact)
    error_of_gradient = relative_error(_gradients(loss, *leaves), _gradients(expected, *exact))
    return Measured(largest(relative_error(loss, expected), error_of_gradient), bound)


def _wmse(
    device: torch.device, num_views: int, iterations: int, options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> Measured:
    """Compare the fused, batched loss with the definition, for every element of the gradient."""
    orders = draw_permutations(iterations, _IMAGES, _CPU, torch.Generator().manual_seed(1)).to(device)
    v = _rows(num_views * _IMAGES, device).to(dtype)
    ours = partial(
        wmse_loss, num_views=num_views, slice_size=_SLICE, iterations=iterations, permutations=orders, **options
    )
    definition = partial(plain.wmse, num_views=num_views, slice_size=_SLICE, orders=orders, **options)
    return _compare(ours, definition, v, bound=_FLOAT64 if dtype == torch.float64 else _FLOAT32)


def _finite_differences(device: torch.device, whitening: str) -> Measured:
    """Compare the gradient with central differences along random directions, without any other definition."""
    orders = torch.arange(_IMAGES, device=device)[None]
    loss_of = partial(wmse_loss, num_views=2, slice_size=_SLICE, iterations=1, permutations=orders, whitening=whitening)
    v = _rows(2 * _IMAGES, device).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(v), v)
    generator = torch.Generator().manual_seed(2)
    step = 1e-5
    found, expected = [], []
    with torch.no_grad():
        for _ in range(8):
            direction = torch.randn(v.shape, dtype=torch.float64, generator=generator).to(device)
            found.append((loss_of(v + step * direction) - loss_of(v - step * direction)) / (2 * step))
            expected.append((gradient * direction).sum())
    # The differences have an error of step^2 times the third derivative.
    return Measured(relative_error(torch.stack(found), torch.stack(expected)), 1e-6)


def _identity(device: torch.device, whitening: str) -> Measured:
    """Compare mean and covariance of whitened slices with 0 and I; standardised columns only have variance 1."""
    z = whiten(_rows(4 * _SLICE, device).view(4, _SLICE, _K), whitening=whitening)
    covariance = torch.stack([torch.cov(rows.T) for rows in z])
    if whitening == "standardise":
        covariance = torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
    identity = torch.eye(_K, dtype=z.dtype, device=device).expand_as(covariance)
    mean = z.mean(1).abs().max().item()
    return Measured(largest(mean, relative_error(covariance, identity)), _FLOAT64)


def _alone(device: torch.device, whitening: str) -> Measured:
    """Scale and shift one view: a view that is whitened alone gives the same loss, which a joint whitening does not."""
    orders = torch.arange(_IMAGES, device=device)[None]
    loss_of = partial(wmse_loss, num_views=2, slice_size=_SLICE, iterations=1, permutations=orders, whitening=whitening)
    v = _rows(2 * _IMAGES, device)
    moved = v.clone()
    moved[_IMAGES:] = 3 * v[_IMAGES:] + 5
    # A second slice of the same view does not matter either.
    moved[_IMAGES : _IMAGES + _SLICE] = 0.1 * v[_IMAGES : _IMAGES + _SLICE] - 7
    return Measured(relative_error(loss_of(moved), loss_of(v)), _FLOAT64)


def _failed_slice(device: torch.device) -> Measured:
    """Give one slice a constant column: the loss is that of the other slices, and its rows get no gradient."""
    v = _rows(2 * _IMAGES, device)
    v[:_SLICE, 2] = 3.7
    good = torch.arange(_SLICE, _IMAGES, device=device)
    orders = torch.arange(_IMAGES, device=device)[None]
    ours = partial(wmse_loss, num_views=2, slice_size=_SLICE, permutations=orders)
    definition = partial(plain.wmse, num_views=2, slice_size=_SLICE, orders=good[None])
    return _compare(ours, definition, v)


def _precision(device: torch.device) -> Measured:
    """Compute the loss under bf16 autocast and with the fastest float32 products: the bits must be those without them."""
    # Small products do not use the fast path of a CPU.
    num_rows, size = 256, 64
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2 * num_rows, size, generator=generator).to(device)
    orders = torch.arange(num_rows, device=device)[None]
    found = []
    for is_fast in (False, True):
        x = v.clone().requires_grad_()
        with precision_flags(device, fast=is_fast), torch.autocast(device.type, torch.bfloat16, enabled=is_fast):
            loss = wmse_loss(x, num_views=2, slice_size=num_rows, permutations=orders)
            (gradient,) = torch.autograd.grad(loss, x)
        found.append(torch.cat([loss.detach().flatten(), gradient.flatten()]))
    return Measured(relative_error(found[1], found[0]), EXACT)


def _wmse_of_embeddings(step: Any, embeddings: Tensor, config: Any) -> Tensor:
    """Compute the loss of a step's embeddings by the definition."""
    orders = step.method.permutations(0, step.images)
    return plain.wmse(embeddings, config.views.num_views, config.wmse.slice_size, orders)


def _step_gradients(device: torch.device) -> Measured:
    """Make one update with SGD and rate 1 in float64: the weights move by the gradients of the definition."""
    config = tiny_config("wmse", images=32, views=4, iterations=3)
    step = train_step(config, _RANKS, device)
    networks = step.method.networks
    pixels = draw_pixels(config, device)
    weights = list(networks.parameters())
    expected_loss = _wmse_of_embeddings(step, networks(pixels), config)
    expected = torch.autograd.grad(expected_loss, weights)
    before = [w.detach().clone() for w in weights]
    result = step(pixels, 0, 1.0)
    moved = [old - w.detach() for old, w in zip(before, weights, strict=True)]
    # Biases before a BatchNorm have no gradient but rounding, so all weights share one scale.
    errors = relative_error(_flat(moved), _flat(expected))
    return Measured(largest(errors, relative_error(result.loss, expected_loss)), 1e-8)


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _step_in_bf16(device: torch.device) -> Measured:
    """Make a step with the networks in bf16 autocast: its loss is that of its embeddings in float64."""
    config = tiny_config("wmse", images=32, views=4)
    step = train_step(replace(config, precision="bf16"), _RANKS, device, dtype=torch.float32)
    result = step(draw_pixels(config, device), 0, 0.0)
    expected = _wmse_of_embeddings(step, result.embeddings.double(), config)
    return Measured(relative_error(result.loss, expected), _FLOAT32)


def _step_in_float32(device: torch.device) -> Measured:
    """Compare a step in float32 on the device with one in float64 on the CPU, from the same weights.

    Gradients that pass through a ReLU differ where rounding moves a value across 0, so only that of the last layer counts."""
    config = tiny_config("wmse", images=64, views=4, slice_size=64)
    step = train_step(config, _RANKS, device, dtype=torch.float32)
    exact_step = train_step(config, _RANKS, _CPU)
    exact_step.method.networks.load_state_dict(step.method.networks.state_dict())
    found = []
    for each in (step, exact_step):
        weight = each.method.networks.get_parameter("projector.last.weight")
        before = weight.detach().clone()
        with precision_flags(each.device, fast=False), without_tf32():
            result = each(draw_pixels(config, each.device), 0, 1.0)
        found.append((result.loss, result.embeddings, before - weight.detach()))
    return Measured(largest(*(relative_error(*pair) for pair in zip(*found, strict=True))), 1e-3)


# --- the other methods ---


def _unit(count: int, device: torch.device, seed: int) -> Tensor:
    return functional.normalize(_rows(count, device, seed), dim=1)


def _simclr(device: torch.device) -> Measured:
    options: dict[str, Any] = {"num_views": 3, "temperature": 0.3}
    return _compare(partial(contrastive_loss, **options), partial(plain.contrastive, **options), _rows(24, device))


def _byol(device: torch.device) -> Measured:
    predictions, targets = _rows(24, device), _rows(24, device, 1)
    ours = partial(regression_loss, targets=targets, num_views=3)
    return _compare(ours, partial(plain.regression, targets=targets, num_views=3), predictions)


def _barlow_twins(device: torch.device) -> Measured:
    options: dict[str, Any] = {"num_views": 3, "off_diagonal_weight": 0.02}
    ours = partial(barlow_twins_loss, num_images=8, **options)
    return _compare(ours, partial(plain.barlow_twins, **options), _rows(24, device))


def _vicreg(device: torch.device) -> Measured:
    """The weights of the sum are arbitrary, so that no two terms can be exchanged."""

    def weighted(terms: Any) -> Tensor:
        return 3 * terms[0] + 5 * terms[1] + terms[2]

    # Some columns must have a standard deviation below 1, or the second term is 0.
    v = _rows(24, device) * torch.logspace(-2, 0, _K, dtype=torch.float64, device=device)
    ours = partial(vicreg_terms, num_views=3, num_images=8)
    return _compare(lambda x: weighted(ours(x)), lambda x: weighted(plain.vicreg(x, 3)), v)


def _swav(device: torch.device) -> Measured:
    options: dict[str, Any] = {"num_views": 3, "temperature": 0.1, "epsilon": 0.05, "iterations": 3}
    scores = _unit(24, device, 0) @ _unit(5, device, 1).T
    return _compare(partial(swapped_prediction_loss, **options), partial(plain.swav, **options), scores)


def _moco(device: torch.device) -> Measured:
    options: dict[str, Any] = {"keys": _unit(8, device, 1), "queue": _unit(12, device, 2), "temperature": 0.2}
    queries = _unit(8, device, 0)
    return _compare(partial(queue_contrast_loss, **options), partial(plain.queue_contrast, **options), queries)


def _align_uniform(device: torch.device) -> Measured:
    keys, queue = _unit(8, device, 1), _unit(12, device, 2)

    # The two forms are equal for rows of length 1 only, so the gradient is taken before the rows are scaled.
    def ours(v: Tensor) -> Tensor:
        x = functional.normalize(v, dim=1)
        return 3 * alignment(x, keys) + uniformity(x, queue, t=3.0)

    def definition(v: Tensor) -> Tensor:
        x = functional.normalize(v, dim=1)
        return 3 * plain.alignment(x, keys) + plain.uniformity(x, queue, 3.0)

    return _compare(ours, definition, _rows(8, device))


_OTHERS = {
    "SimCLR": _simclr,
    "BYOL and SimSiam": _byol,
    "Barlow Twins": _barlow_twins,
    "VICReg": _vicreg,
    "SwAV": _swav,
    "MoCo": _moco,
    "alignment and uniformity": _align_uniform,
}
