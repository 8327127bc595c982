"""Group `views`: DALI's views equal torchvision's of the same crop, flip, colours and blur, and plans do not depend on ranks.

Differences are in levels of 0..255. They leave out a border, where DALI's filter uses pixels outside of the crop, which
torchvision has cut off.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.color import color_matrices
from trainer.data.index import open_index
from trainer.data.plan import Plan, Planner, crop_windows, slice_permutations
from trainer.distributed.ranks import ImageRange
from trainer.models.encoder import Normalize
from trainer.verify.check import EXACT, Item, Measured, Place, SkipCheck, relative_error
from trainer.verify.pictures import coloured_pictures, demo_root

_BORDER = 16
_PICTURES = 24
_GPU_ALLOWANCE = 0.6  # rounding of a GPU's filters
_PLAIN = ViewsConfig(
    num_views=2,
    size=96,
    crop_area=(0.4, 1.0),
    color_probability=0.0,
    gray_probability=0.0,
    blur_probability=0.0,
)
_COLOUR = replace(
    _PLAIN,
    color_probability=0.8,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.0,
    gray_probability=0.1,
)
_BLUR = replace(_PLAIN, blur_probability=0.5)
_ALL = replace(_COLOUR, hue=0.1, blur_probability=0.5)
# Recipe, whether the bound is for the view with the largest mean difference, and the bound.
_RECIPES = {
    "crop, resize (bicubic) and flip": (_PLAIN, True, 0.5),
    "crop, resize (bilinear) and flip": (replace(_PLAIN, interpolation="bilinear"), True, 0.5),
    "crop and antialiased resize to half the size": (replace(_PLAIN, size=48), True, 0.5),
    "blur": (_BLUR, True, 0.5),
    "colour without hue": (_COLOUR, False, 0.5),
    "colour before the crop": (replace(_COLOUR, order="color_first"), False, 0.5),
    "colour with hue, and blur": (_ALL, False, 2.0),
}


def views_items(place: Place) -> Iterator[Item]:
    """Yield the checks of views, on the CPU and on the GPU."""
    yield "crop windows have the shares and ratios of the recipe", _windows
    yield "views of two ranks are those of one", _plans_of_ranks
    yield "slice orders are permutations inside their blocks", _slice_orders
    yield "colour operations in their drawn order", _colours
    yield "normalisation of pixels", partial(_normalisation, place.device)
    for on_gpu in (False, True):
        device = "DALI on the GPU" if on_gpu else "DALI on the CPU"
        for name, (recipe, of_worst_view, bound) in _RECIPES.items():
            yield f"{device}: {name}", partial(_views, place, on_gpu, recipe, of_worst_view, bound)
        yield f"{device}: the loader returns the planned views", partial(_loader, place, on_gpu)
        yield f"{device}: solarisation", partial(_solarisation, place, on_gpu)
        yield f"{device}: centre crop of an evaluation", partial(_centre_crops, place, on_gpu)


def _gpu(place: Place, on_gpu: bool) -> int | None:
    """Return the number of the GPU that DALI uses; None for the CPU. Raises SkipCheck if DALI or the GPU is missing."""
    if importlib.util.find_spec("nvidia.dali") is None:
        raise SkipCheck("DALI is not installed")
    if not on_gpu:
        return None
    if not place.on_gpu:
        raise SkipCheck("no GPU")
    return place.device.index or 0


def _plan(recipe: ViewsConfig, first: int = 0, count: int = _PICTURES) -> Plan:
    planner = Planner(
        recipe,
        seed=1,
        num_images=4 * _PICTURES,
        images_per_step=_PICTURES,
        images=ImageRange(first, count),
    )
    return planner.plan(0)


def _views(place: Place, on_gpu: bool, recipe: ViewsConfig, of_worst_view: bool, bound: float) -> Measured:
    """Compare with torchvision: the view with the largest mean difference, or the mean over all views."""
    gpu = _gpu(place, on_gpu)
    from trainer.verify.dali_views import dali_views
    from trainer.verify.reference_views import reference_views

    # Both draw the same plan from the same files.
    encoded = coloured_pictures(_PICTURES)
    plan = _plan(recipe)
    found = dali_views(encoded, plan, recipe, gpu)
    expected = reference_views(encoded, plan, recipe)
    inside = slice(_BORDER, -_BORDER)
    differences = (found.float() - expected.float()).abs()
    of_views = differences[..., inside, inside].mean((2, 3, 4))  # (d, N)
    error = of_views.max() if of_worst_view else of_views.mean()
    return Measured(error.item(), bound + on_gpu * _GPU_ALLOWANCE)


def _loader(place: Place, on_gpu: bool) -> Measured:
    """Compare two batches of the loader with the graph's views of the planned photographs: all bytes must be equal."""
    gpu = _gpu(place, on_gpu)
    from trainer.data.loader import ViewLoader, train_requests
    from trainer.verify.dali_views import dali_views

    recipe = replace(_ALL, size=28)
    index = open_index(demo_root(), "test")
    planner = Planner(
        recipe,
        seed=2,
        num_images=len(index),
        images_per_step=_PICTURES,
        images=ImageRange(0, _PICTURES),
    )
    # Start in the middle, as after a restart.
    loader = ViewLoader(
        index,
        recipe,
        DataConfig(),
        train_requests(planner),
        batch_size=_PICTURES,
        device=torch.device("cpu") if gpu is None else place.device,
        first_step=3,
        end_step=5,
    )
    worst = 0.0
    for batch in loader:
        plan = planner.plan(batch.step)
        # The pixels are compared with those of the planned images, so the order comes first.
        if batch.image_ids.tolist() != plan.image_ids.tolist():
            raise ValueError(f"step {batch.step} shows other images than planned")
        encoded = [index.read(number) for number in plan.image_ids]
        expected = dali_views(encoded, plan, recipe, gpu).flatten(0, 1)
        difference = (batch.views.cpu().int() - expected.int()).abs().max()
        worst = max(worst, difference.item())
    return Measured(worst, EXACT)


def _solarisation(place: Place, on_gpu: bool) -> Measured:
    """Compare with the inverse of the levels from 128 on of the views before it. All pixels must be equal."""
    gpu = _gpu(place, on_gpu)
    from trainer.verify.dali_views import dali_views

    # One view is never solarised, the other one half of the time.
    recipe = replace(_PLAIN, solarize_probability=(0.0, 0.5))
    encoded = coloured_pictures(_PICTURES)
    plan = _plan(recipe)
    before = dali_views(encoded, plan, _PLAIN, gpu)
    is_solarised = torch.from_numpy(plan.solarize.T)[..., None, None, None]
    is_inverted = is_solarised & (before >= 128)
    expected = torch.where(is_inverted, 255 - before, before)
    if torch.equal(expected, before):
        raise ValueError("the plan solarises no view")
    found = dali_views(encoded, plan, recipe, gpu)
    # Differences of uint8 would wrap around.
    differences = (found.int() - expected.int()).abs()
    return Measured(differences.max().item(), EXACT)


def _centre_crops(place: Place, on_gpu: bool) -> Measured:
    """Compare with torchvision: the picture with the largest mean difference."""
    gpu = _gpu(place, on_gpu)
    from trainer.verify.dali_views import dali_eval
    from trainer.verify.reference_views import reference_centre_crop

    recipe = replace(_PLAIN, size=56, eval_resize=64)
    encoded = coloured_pictures(_PICTURES)
    found = dali_eval(encoded, recipe, gpu)
    errors = []
    for view, data in zip(found, encoded, strict=True):
        expected = reference_centre_crop(data, recipe)
        errors.append((view.float() - expected.float()).abs().mean())
    return Measured(torch.stack(errors).max().item(), 0.6 + on_gpu * _GPU_ALLOWANCE)


def _windows() -> Measured:
    """Draw windows in a large image, where rounding hardly matters, and compare their shares with uniform ones.

    The error is the largest difference between a quantile of the drawn numbers and the same quantile of the distribution."""
    recipe = ViewsConfig(num_views=4)
    count = 2000
    planner = Planner(
        recipe,
        seed=5,
        num_images=count,
        images_per_step=count,
        images=ImageRange(0, count),
    )
    side = 20_000
    sides = np.full(count, side)
    windows = crop_windows(planner.plan(0), recipe, sides, sides).reshape(-1, 4)
    top, left, height, width = windows.T.astype(np.float64)
    is_inside = (top >= 0) & (left >= 0) & (top + height <= side) & (left + width <= side)
    if not is_inside.all():
        raise ValueError("a window lies outside of the image")
    share = height * width / side**2
    low, high = recipe.crop_area
    # Windows of almost the whole image are drawn again if they do not fit, so the largest shares are left out.
    few = share < 0.5
    # Each of these is uniform on 0..1: the share, the logarithm of the ratio between 3/4 and 4/3, and the position.
    log_ratio = np.log(width[few] / height[few])
    samples = [
        (share[few] - low) / (0.5 - low),
        (log_ratio - np.log(3 / 4)) / np.log(16 / 9),
        top[few] / (side - height[few]),
        left[few] / (side - width[few]),
    ]
    errors = [_distance_from_uniform(sample) for sample in samples]
    is_too_large = float(share.max() > high)
    return Measured(max(*errors, is_too_large), 0.03)


def _distance_from_uniform(values: np.ndarray) -> float:
    """Return the largest difference between a sorted sample and the quantiles of the uniform distribution on 0..1."""
    # The quantiles lie in the middle of equal parts.
    quantiles = (np.arange(len(values)) + 0.5) / len(values)
    return float(np.abs(np.sort(values) - quantiles).max())


def _plans_of_ranks() -> Measured:
    """Join the plans of two ranks of different sizes: every random choice must be that of one rank."""
    whole = _plan(_ALL)
    parts = [_plan(_ALL, 0, 10), _plan(_ALL, 10, _PICTURES - 10)]
    different = 0
    for name in whole._fields[2:]:  # the first two are step and epoch
        joined = np.concatenate([getattr(part, name) for part in parts])
        expected = getattr(whole, name)
        different += int((joined != expected).sum())
    return Measured(different, EXACT)


def _slice_orders() -> Measured:
    """Count the images that an order leaves out, and those that leave their block."""
    block = 16
    orders = slice_permutations(seed=1, step=2, num_images=64, iterations=4, block=block)
    images = np.arange(64)
    missing = sum(len(set(images) - set(order)) for order in orders)
    moved = int((orders // block != images // block).sum())
    # The iterations must have different orders.
    different_orders = {tuple(order) for order in orders}
    same = len(orders) - len(different_orders)
    return Measured(missing + moved + same, EXACT)


def _colours() -> Measured:
    """Compare the affine map of each view with its operations one by one, in their order, on pixels that are not clamped.

    Only a hue makes the order matter: the other operations can be exchanged."""
    recipe = replace(_COLOUR, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2)
    plan = _plan(recipe)
    a, c = color_matrices(plan, recipe)
    pixels = np.random.default_rng(0).uniform(0, 255, (50, 3))
    errors = []
    for row, view in np.ndindex(plan.gray.shape):
        expected = _coloured(pixels, plan, row, view)
        # One matrix applies to each pixel, the other one to the mean of the image.
        of_pixels = pixels @ a[row, view].T
        of_mean = pixels.mean(0) @ c[row, view].T
        errors.append(np.abs(of_pixels + of_mean - expected).max() / 255)
    return Measured(float(max(errors)), 1e-5)


def _coloured(pixels: np.ndarray, plan: Plan, row: int, view: int) -> np.ndarray:
    """Return the pixels (n, 3) after the colour operations of a view. The hue turns about the grey axis (1, 1, 1)."""
    x = pixels
    weights = np.array([0.2989, 0.587, 0.114])  # of the channels in the grey level
    operations = plan.factor_order[row, view] if plan.jitter[row, view] else ()
    for operation in operations:
        factor = plan.factors[row, view, operation]
        grey = (x @ weights)[:, None]
        if operation == 0:  # brightness
            x = factor * x
        elif operation == 1:  # contrast
            x = factor * x + (1 - factor) * grey.mean()
        elif operation == 2:  # saturation
            x = factor * x + (1 - factor) * grey
        else:
            # A third of a turn exchanges the channels: red becomes green, green blue, and blue red. Between them the part
            # of a pixel off the grey axis moves on a circle.
            centre = x.mean(1, keepdims=True)
            off = x - centre
            across = (np.roll(off, 1, axis=1) - np.roll(off, -1, axis=1)) / 3**0.5
            angle = 2 * np.pi * factor
            x = centre + np.cos(angle) * off + np.sin(angle) * across
    if plan.gray[row, view]:
        grey = (x @ weights)[:, None]
        x = np.repeat(grey, 3, axis=1)
    return x


def _normalisation(device: torch.device) -> Measured:
    """Compare with (pixel / 255 - mean) / std of each channel."""
    recipe = ViewsConfig(mean=(0.1, 0.4, 0.7), std=(0.2, 0.3, 0.6))
    levels = torch.arange(256, dtype=torch.uint8, device=device)
    plane = levels.view(16, 16)
    channels = []
    for mean, std in zip(recipe.mean, recipe.std, strict=True):
        channels.append((plane.double() / 255 - mean) / std)
    expected = torch.stack(channels)
    normalize = Normalize(recipe).to(device)
    found = normalize(plane.expand(1, 3, 16, 16))[0]
    return Measured(relative_error(found, expected), 1e-6)
