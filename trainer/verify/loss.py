"""Group `loss`: the losses that training uses, and their gradients, equal the plain definitions in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import WHITENINGS
from kernels.whitening import whiten
from trainer.config.schema import Config
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
from trainer.step import TrainStep
from trainer.verify import plain
from trainer.verify.check import EXACT, Item, Measured, Place, draw_normal, largest, largest_relative, relative_error
from trainer.verify.training import draw_pixels, precision_flags, tiny_config, train_step

Loss = Callable[..., Tensor]
_SLICE = 16
_K = 6
_IMAGES = 48  # three slices of each view
_FLOAT64 = 1e-9
_FLOAT32 = 1e-4  # some hundred times the rounding of float32, as the slices have condition numbers of some tens
_CPU = torch.device("cpu")
_RANKS = Ranks()  # one process


def loss_items(place: Place) -> Iterator[Item]:
    """Yield the checks of losses."""
    device = place.device
    # Two views have one pair, four have six, and each iteration cuts other slices.
    for num_views in (2, 4):
        for iterations in (1, 4):
            for whitening in WHITENINGS:
                plural = "s" if iterations > 1 else ""
                name = f"W-MSE, {num_views} views, {iterations} iteration{plural}, {whitening}"
                yield name, partial(_wmse, device, num_views, iterations, whitening=whitening)
    yield "W-MSE, Euclidean distance", partial(_wmse, device, 3, 2, normalize=False)
    yield "W-MSE, shrinkage eps 0.1", partial(_wmse, device, 2, 1, eps=0.1)
    yield "W-MSE, float32", partial(_wmse, device, 4, 2, torch.float32)
    for whitening in WHITENINGS:
        yield f"gradient by finite differences, {whitening}", partial(_finite_differences, device, whitening)
        yield f"whitened slices have identity covariance, {whitening}", partial(_identity, device, whitening)
        yield f"each view is whitened alone, {whitening}", partial(_alone, device, whitening)
    yield "a slice that cannot be whitened does not count", partial(_failed_slice, device)
    yield "autocast and fast float32 products do not reach the whitening", partial(_precision, device)
    yield "training step, loss and gradients of all weights", partial(_step_gradients, device)
    yield "training step in bf16, loss of its embeddings", partial(_step_in_bf16, device)
    yield "training step in float32, loss, embeddings and last layer", partial(_step_in_float32, device)
    # The methods without whitening have one check each.
    for method, measure in _OTHERS.items():
        yield method, partial(measure, device)


def _rows(count: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw correlated rows (count, k) with a mean, in float64."""
    generator = torch.Generator().manual_seed(seed)
    white = draw_normal(generator, count, _K)
    noise = draw_normal(generator, _K, _K)
    # The diagonal keeps the mixing matrix away from singular ones.
    mix = noise / 2 + 2 * torch.eye(_K)
    return (white @ mix + 1).to(device)


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """Join tensors to one vector, so that all of them share one scale of errors."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def _compare(ours: Loss, definition: Loss, *inputs: Tensor, bound: float = _FLOAT64) -> Measured:
    """Measure the error of value and gradient. The definition gets the inputs in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    # Each side gets leaves of its own, so that their gradients stay apart.
    loss = ours(*leaves)
    gradient = _joined(torch.autograd.grad(loss, leaves))
    exact_leaves = [x.detach().double().requires_grad_() for x in inputs]
    exact_loss = definition(*exact_leaves)
    exact_gradient = _joined(torch.autograd.grad(exact_loss, exact_leaves))
    error = largest_relative([(loss, exact_loss), (gradient, exact_gradient)])
    return Measured(error, bound)


def _wmse(
    device: torch.device,
    num_views: int,
    iterations: int,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Measured:
    """Compare the fused, batched loss with the definition, for every element of the gradient."""
    generator = torch.Generator().manual_seed(1)
    orders = draw_permutations(iterations, _IMAGES, _CPU, generator).to(device)
    v = _rows(num_views * _IMAGES, device).to(dtype)
    ours = partial(
        wmse_loss,
        num_views=num_views,
        slice_size=_SLICE,
        iterations=iterations,
        permutations=orders,
        **options,
    )
    definition = partial(
        plain.wmse,
        num_views=num_views,
        slice_size=_SLICE,
        orders=orders,
        **options,
    )
    bound = _FLOAT64 if dtype == torch.float64 else _FLOAT32
    return _compare(ours, definition, v, bound=bound)


def _loss_in_order(device: torch.device, whitening: str) -> Loss:
    """Return the W-MSE loss of two views, (2*N, k), whose slices are cut in the order of the images."""
    orders = torch.arange(_IMAGES, device=device)[None]
    return partial(
        wmse_loss,
        num_views=2,
        slice_size=_SLICE,
        iterations=1,
        permutations=orders,
        whitening=whitening,
    )


def _finite_differences(device: torch.device, whitening: str) -> Measured:
    """Compare the gradient with central differences along random directions, without any other definition."""
    loss_of = _loss_in_order(device, whitening)
    v = _rows(2 * _IMAGES, device).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(v), v)
    generator = torch.Generator().manual_seed(2)
    step = 1e-5
    found = []
    expected = []
    with torch.no_grad():
        for _ in range(8):
            direction = draw_normal(generator, *v.shape).to(device)
            after = loss_of(v + step * direction)
            before = loss_of(v - step * direction)
            found.append((after - before) / (2 * step))
            expected.append((gradient * direction).sum())
    # The differences have an error of step^2 times the third derivative.
    error = relative_error(torch.stack(found), torch.stack(expected))
    return Measured(error, 1e-6)


def _identity(device: torch.device, whitening: str) -> Measured:
    """Compare mean and covariance of whitened slices with 0 and I; standardised columns only have variance 1."""
    slices = _rows(4 * _SLICE, device).view(4, _SLICE, _K)
    z = whiten(slices, whitening=whitening)
    # torch.cov takes the columns as observations.
    covariance = torch.stack([torch.cov(rows.T) for rows in z])
    if whitening == "standardise":
        covariance = torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
    identity = torch.eye(_K, dtype=z.dtype, device=device).expand_as(covariance)
    largest_mean = z.mean(1).abs().max().item()
    error = relative_error(covariance, identity)
    return Measured(largest(largest_mean, error), _FLOAT64)


def _alone(device: torch.device, whitening: str) -> Measured:
    """Scale and shift one view: a view that is whitened alone gives the same loss, which a joint whitening does not."""
    loss_of = _loss_in_order(device, whitening)
    v = _rows(2 * _IMAGES, device)
    moved = v.clone()
    moved[_IMAGES:] = 3 * v[_IMAGES:] + 5
    # Slices of one view are whitened alone as well, so its first slice moves in another way.
    first_slice = slice(_IMAGES, _IMAGES + _SLICE)
    moved[first_slice] = 0.1 * v[first_slice] - 7
    error = relative_error(loss_of(moved), loss_of(v))
    return Measured(error, _FLOAT64)


def _failed_slice(device: torch.device) -> Measured:
    """Give one slice a constant column: the loss is that of the other slices, and its rows get no gradient."""
    v = _rows(2 * _IMAGES, device)
    v[:_SLICE, 2] = 3.7
    # The definition never sees the images of the first slice.
    good = torch.arange(_SLICE, _IMAGES, device=device)
    definition = partial(plain.wmse, num_views=2, slice_size=_SLICE, orders=good[None])
    return _compare(_loss_in_order(device, "cholesky"), definition, v)


def _precision(device: torch.device) -> Measured:
    """Compute the loss under bf16 autocast and with the fastest float32 products: the bits must be those without them."""
    # Small products do not use the fast path of a CPU.
    num_rows = 256
    size = 64
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2 * num_rows, size, generator=generator).to(device)
    orders = torch.arange(num_rows, device=device)[None]
    found = []
    for is_fast in (False, True):
        x = v.clone().requires_grad_()
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_fast)
        with precision_flags(device, fast=is_fast), autocast:
            loss = wmse_loss(x, num_views=2, slice_size=num_rows, permutations=orders)
            (gradient,) = torch.autograd.grad(loss, x)
        found.append(_joined([loss.detach(), gradient]))
    exact, fast = found
    return Measured(relative_error(fast, exact), EXACT)


def _wmse_of_embeddings(step: TrainStep, embeddings: Tensor, config: Config) -> Tensor:
    """Compute the loss of a step's embeddings by the definition."""
    method: Any = step.method
    orders = method.permutations(0, step.images)
    return plain.wmse(embeddings, config.views.num_views, config.wmse.slice_size, orders)


def _step_gradients(device: torch.device) -> Measured:
    """Make one update with SGD and rate 1 in float64: the weights move by the gradients of the definition."""
    config = tiny_config("wmse", images=32, views=4, iterations=3)
    step = train_step(config, _RANKS, device)
    networks = step.method.networks
    pixels = draw_pixels(config, device)
    weights = list(networks.parameters())
    # The update changes the weights, so the definition goes first.
    expected_loss = _wmse_of_embeddings(step, networks(pixels), config)
    expected = torch.autograd.grad(expected_loss, weights)
    before = [w.detach().clone() for w in weights]
    result = step(pixels, 0, 1.0)
    moved = [old - w.detach() for old, w in zip(before, weights, strict=True)]
    # Biases before a BatchNorm have no gradient but rounding, so all weights share one scale.
    pairs = [
        (result.loss, expected_loss),
        (_joined(moved), _joined(expected)),
    ]
    return Measured(largest_relative(pairs), 1e-8)


def _step_in_bf16(device: torch.device) -> Measured:
    """Make a step with the networks in bf16 autocast: its loss is that of its embeddings in float64."""
    config = tiny_config("wmse", images=32, views=4)
    # Only the networks compute in bf16; the loss must see the embeddings in full precision.
    in_bf16 = replace(config, precision="bf16")
    step = train_step(in_bf16, _RANKS, device, dtype=torch.float32)
    result = step(draw_pixels(config, device), 0, 0.0)
    expected = _wmse_of_embeddings(step, result.embeddings.double(), config)
    return Measured(relative_error(result.loss, expected), _FLOAT32)


def _step_in_float32(device: torch.device) -> Measured:
    """Compare a step in float32 on the device with one in float64 on the CPU, from the same weights.

    Gradients that pass through a ReLU differ where rounding moves a value across 0, so only that of the last layer counts."""
    config = tiny_config("wmse", images=64, views=4, slice_size=64)
    step = train_step(config, _RANKS, device, dtype=torch.float32)
    # The other step has the same weights in float64.
    exact_step = train_step(config, _RANKS, _CPU)
    exact_step.method.networks.load_state_dict(step.method.networks.state_dict())
    found = []
    for each in (step, exact_step):
        weight = each.method.networks.get_parameter("projector.last.weight")
        before = weight.detach().clone()
        pixels = draw_pixels(config, each.device)
        with precision_flags(each.device, fast=False), without_tf32():
            result = each(pixels, 0, 1.0)
        # With plain SGD and rate 1, the change of a weight is its gradient.
        gradient = before - weight.detach()
        found.append((result.loss, result.embeddings, gradient))
    pairs = zip(*found, strict=True)
    return Measured(largest_relative(pairs), 1e-3)


# --- the other methods ---


def _unit(count: int, device: torch.device, seed: int) -> Tensor:
    """Draw rows (count, k) of length 1."""
    return functional.normalize(_rows(count, device, seed), dim=1)


def _simclr(device: torch.device) -> Measured:
    options: dict[str, Any] = {"num_views": 3, "temperature": 0.3}
    ours = partial(contrastive_loss, **options)
    definition = partial(plain.contrastive, **options)
    return _compare(ours, definition, _rows(24, device))


def _byol(device: torch.device) -> Measured:
    predictions = _rows(24, device)
    targets = _rows(24, device, 1)
    ours = partial(regression_loss, targets=targets, num_views=3)
    definition = partial(plain.regression, targets=targets, num_views=3)
    return _compare(ours, definition, predictions)


def _barlow_twins(device: torch.device) -> Measured:
    options: dict[str, Any] = {"num_views": 3, "off_diagonal_weight": 0.02}
    ours = partial(barlow_twins_loss, num_images=8, **options)
    definition = partial(plain.barlow_twins, **options)
    return _compare(ours, definition, _rows(24, device))


def _vicreg(device: torch.device) -> Measured:
    """Compare a sum of the three terms, with different weights, so that no two terms can be exchanged."""

    def weighted(terms: tuple[Tensor, ...]) -> Tensor:
        invariance, variance, covariance = terms
        return 3 * invariance + 5 * variance + covariance

    # Some columns must have a standard deviation below 1, or the second term is 0.
    deviations = torch.logspace(-2, 0, _K, dtype=torch.float64, device=device)
    v = _rows(24, device) * deviations
    return _compare(
        lambda x: weighted(vicreg_terms(x, num_views=3, num_images=8)),
        lambda x: weighted(plain.vicreg(x, 3)),
        v,
    )


def _swav(device: torch.device) -> Measured:
    options: dict[str, Any] = {
        "num_views": 3,
        "temperature": 0.1,
        "epsilon": 0.05,
        "iterations": 3,
    }
    ours = partial(swapped_prediction_loss, **options)
    definition = partial(plain.swav, **options)
    # Cosines of 24 embeddings with 5 prototypes.
    scores = _unit(24, device, 0) @ _unit(5, device, 1).T
    return _compare(ours, definition, scores)


def _moco(device: torch.device) -> Measured:
    options: dict[str, Any] = {
        "keys": _unit(8, device, 1),
        "queue": _unit(12, device, 2),
        "temperature": 0.2,
    }
    queries = _unit(8, device, 0)
    ours = partial(queue_contrast_loss, **options)
    definition = partial(plain.queue_contrast, **options)
    return _compare(ours, definition, queries)


def _align_uniform(device: torch.device) -> Measured:
    # Keys and queue have length 1, as the program keeps them.
    keys = _unit(8, device, 1)
    queue = _unit(12, device, 2)

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
