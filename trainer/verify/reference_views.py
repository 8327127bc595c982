"""The views of a plan drawn with torchvision, slow and obvious. `wmse verify` and the tests compare DALI's views with it."""

from __future__ import annotations

import io

import numpy as np
import torch
import torchvision.transforms.v2.functional as F
from PIL import Image

from trainer.config.schema import ViewsConfig
from trainer.data.plan import Plan, crop_windows

_INTERPOLATION = {
    "bicubic": F.InterpolationMode.BICUBIC,
    "bilinear": F.InterpolationMode.BILINEAR,
}


def reference_views(encoded: list[bytes], plan: Plan, recipe: ViewsConfig) -> torch.Tensor:
    """Return the views of N encoded images, (d, N, 3, S, S) uint8."""
    images = [F.pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB")) for data in encoded]
    sizes = np.array([image.shape[1:] for image in images])
    # The windows are those of the program, which have a check of their own.
    windows = crop_windows(plan, recipe, sizes[:, 0], sizes[:, 1])
    # View-major: all images of the first view, then those of the next one.
    views = []
    for view in range(recipe.num_views):
        of_images = [_view(image, plan, recipe, windows, row, view) for row, image in enumerate(images)]
        views.append(torch.stack(of_images))
    return torch.stack(views)


def reference_centre_crop(encoded: bytes, recipe: ViewsConfig) -> torch.Tensor:
    """Return the centre crop of an evaluation, (3, S, S) uint8."""
    # Resize the shorter edge, then cut out the centre, both by torchvision.
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    image = F.resize(image, recipe.eval_resize, _INTERPOLATION[recipe.interpolation])
    return F.pil_to_tensor(F.center_crop(image, recipe.size))


def _view(
    image: torch.Tensor, plan: Plan, recipe: ViewsConfig, windows: np.ndarray, row: int, view: int
) -> torch.Tensor:
    """Return one view of one image, (3, S, S) uint8."""
    # The colours change before or after the crop, as the recipe says.
    if recipe.order == "color_first":
        image = _color(image, plan, row, view)
    top, left, height, width = map(int, windows[row, view])
    v = F.resized_crop(
        image,
        top,
        left,
        height,
        width,
        size=[recipe.size] * 2,
        interpolation=_INTERPOLATION[recipe.interpolation],
        antialias=True,
    )
    if plan.flip[row, view]:
        v = F.horizontal_flip(v)
    if recipe.order == "crop_first":
        v = _color(v, plan, row, view)
    # A sigma of 0 stands for a view without blur.
    sigma = float(plan.blur_sigma[row, view])
    if sigma:
        v = F.gaussian_blur(v, [recipe.blur_window] * 2, [sigma] * 2)
    if plan.solarize[row, view]:
        v = F.solarize(v, 128)
    return v


def _color(v: torch.Tensor, plan: Plan, row: int, view: int) -> torch.Tensor:
    """Apply the colour operations of one view in float, clamp to 0..1 after each, and round once at the end.

    torchvision's uint8 path truncates after each operation, which makes an image darker by up to 1.5 levels.
    """
    x = F.to_dtype(v, torch.float32, scale=True)
    operations = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    if plan.jitter[row, view]:
        for which in plan.factor_order[row, view]:
            x = operations[which](x, float(plan.factors[row, view, which]))
    if plan.gray[row, view]:
        x = F.rgb_to_grayscale(x, num_output_channels=3)
    return (x * 255).round().to(torch.uint8)
