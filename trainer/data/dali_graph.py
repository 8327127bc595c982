"""The DALI graph that turns encoded images into d views each; one function for CPU and GPU.

DALI is imported by the functions that build the graph, so that a step can be built and measured where it is not installed.

It draws nothing: windows, colour matrices and blur widths are inputs, computed from the plan by `view_arrays`. An image
is decoded once. Crop, resize and flip are one operation (the window's x is swapped for a flip), colour is one affine
map. A view that is not blurred passes the blur by on the CPU, and has one tap on a GPU, which leaves it as it is.

Shapes: N images of this rank, d views, S pixels a side. Views leave as uint8 (N, S, S, 3), one output a view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.schema import ViewsConfig
from trainer.data.color import color_matrices
from trainer.data.plan import Plan, crop_windows

Arrays = list[Any]  # one batched array, or list of encoded images, for each input of the graph
Source = Callable[[], Arrays]


@dataclass(frozen=True)
class Placement:
    """Where and how wide DALI works."""

    device_id: int | None
    """GPU number; None: CPU only."""
    threads: int
    prefetch: int
    """Batches that DALI keeps ahead of the one taken."""
    hw_decoder_load: float = 1.0
    """Share of the JPEGs for a GPU's hardware decoder."""
    decoder_hint: tuple[int, int] = (0, 0)
    """Width and height of an image for which a GPU's hardware decoder makes room at the start, pixels; 0: as they come."""


def has_color(recipe: ViewsConfig) -> bool:
    """Whether the recipe ever changes colour; if not, the graph leaves the operation out."""
    jitter = recipe.color_probability > 0 and any((recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue))
    return jitter or recipe.gray_probability > 0


def view_arrays(
    plan: Plan, recipe: ViewsConfig, heights: NDArray[np.integer], widths: NDArray[np.integer]
) -> list[NDArray]:
    """The graph's inputs after the encoded images, in its order: for each view roi start (N, 2), roi end (N, 2), colour
    matrices A, C (N, 3, 3), blur sigma (N,) and taps (N,)."""
    top, left, height, width = np.moveaxis(crop_windows(plan, recipe, heights, widths), -1, 0)
    x = np.stack([left, left + width], axis=-1)
    x = np.where(plan.flip[..., None], x[..., ::-1], x)
    start = np.stack([top, x[..., 0]], axis=-1).astype(np.float32)
    end = np.stack([top + height, x[..., 1]], axis=-1).astype(np.float32)
    fields: list[NDArray] = [start, end]
    if has_color(recipe):
        fields += color_matrices(plan)
    if recipe.blur_probability > 0:
        # Beyond 3 sigma lies 0.3 % of a Gaussian: 0.25 levels of a photograph's pixel at most, 0.0015 in the mean, and a
        # tap costs a blurred view 4 % of its time. 1 where sigma is 0: not blurred
        taps = np.minimum(recipe.blur_window, 2 * np.ceil(3 * plan.blur_sigma) + 1)
        fields += [np.maximum(plan.blur_sigma, 0.01).astype(np.float32), taps.astype(np.int32)]
    return [np.ascontiguousarray(f[:, view]) for view in range(recipe.num_views) for f in fields]


def eval_arrays(recipe: ViewsConfig, heights: NDArray[np.integer], widths: NDArray[np.integer]) -> list[NDArray]:
    """The graph's inputs for evaluation, roi start and end (N, 2): as if the shorter edge were resized to
    `recipe.eval_resize` and the centre cut out, in one resize (sizes and offsets rounded as torchvision does)."""
    size = np.stack([heights, widths], axis=-1).astype(np.int64)
    resized = size * recipe.eval_resize // size.min(axis=-1, keepdims=True)
    corner = np.rint((resized - recipe.size) / 2)
    scale = size / resized
    return [(corner * scale).astype(np.float32), ((corner + recipe.size) * scale).astype(np.float32)]


def eval_recipe(recipe: ViewsConfig) -> ViewsConfig:
    """The same pixels without augmentation: one view, no colour, no blur."""
    return replace(recipe, num_views=1, color_probability=0.0, gray_probability=0.0, blur_probability=0.0)


def view_pipeline(
    recipe: ViewsConfig, batch_size: int, place: Placement, source: Source, *, decoded: bool = False
) -> Any:
    """A built DALI pipeline whose outputs are the d views, uint8 (N, S, S, 3) on the placement's device.

    source: called for each batch; returns [encoded images (a list of uint8 arrays), *view_arrays(...)]; with `decoded` pixels
    (H, W, 3) in place of encoded images.
    """
    from nvidia.dali import fn, pipeline_def, types

    color, blur = has_color(recipe), recipe.blur_probability > 0
    inputs_per_view = 2 + 2 * color + 2 * blur
    interpolation = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}[recipe.interpolation]

    # stream_policy stays at DALI's default. With StreamPolicy.SINGLE, a GPU's JPEG engine, which does not keep to the order of
    # a stream, could write into memory that the same stream had just given back
    @pipeline_def(
        batch_size=batch_size,
        num_threads=place.threads,
        device_id=place.device_id,
        prefetch_queue_depth=place.prefetch,
        enable_conditionals=True,
    )
    def graph() -> tuple[Any, ...]:
        encoded, *arrays = fn.external_source(
            source=source, num_outputs=1 + inputs_per_view * recipe.num_views, batch=True
        )
        image = on_device(encoded, place) if decoded else decode(encoded, place)
        image_mean = _mean(image) if color and recipe.order == "color_first" else None
        views = []
        for view in range(recipe.num_views):
            start, end, *rest = arrays[view * inputs_per_view : (view + 1) * inputs_per_view]
            v = fn.resize(
                image,
                size=(recipe.size, recipe.size),
                roi_start=start,
                roi_end=end,
                antialias=True,
                interp_type=interpolation,
            )
            if color:
                v = _affine(v, rest[0], rest[1], image_mean, place)
            if blur:
                v = _blur(v, rest[-2], rest[-1], place)
            views.append(v)
        return tuple(views)

    pipe = graph()
    pipe.build()
    return pipe


def decode(encoded: Any, place: Placement) -> Any:
    """RGB pixels as stored (no EXIF turning) of encoded images, each decoded whole: nvImageCodec 0.9, which DALI 2.4 needs,
    is reported to end the process where an H100 decodes a window of a JPEG, even one as large as the image.

    The decoder's input depends on the shape, which is read first: bytes that are not an image raise an error there, and no
    device's decoder sees them.
    """
    from nvidia.dali import fn, types

    shape = fn.peek_image_shape(encoded, adjust_orientation=False)
    # -1 for whatever shape was read: reshape takes it for the number of bytes, and copies nothing
    as_it_is = fn.cast(fn.slice(shape, start=[0], shape=[1], axes=[0]) * 0 - 1, dtype=types.INT32)
    on_gpu = {} if place.device_id is None else _gpu_decoder(place)
    return fn.decoders.image(
        fn.reshape(encoded, shape=as_it_is),
        adjust_orientation=False,
        output_type=types.RGB,
        device="cpu" if place.device_id is None else "mixed",
        **on_gpu,
    )


def on_device(pixels: Any, place: Placement) -> Any:
    """Images that are decoded already, where the rest of the graph works."""
    from nvidia.dali import fn

    pixels = fn.reshape(pixels, layout="HWC")  # without a layout a blur would mix channels
    return pixels if place.device_id is None else pixels.gpu()


def _gpu_decoder(place: Placement) -> dict[str, Any]:
    """Arguments of a decoder on a GPU."""
    width, height = place.decoder_hint
    hints = {"preallocate_width_hint": width, "preallocate_height_hint": height} if width and height else {}
    return {"hw_decoder_load": place.hw_decoder_load, **hints}


def _mean(image: Any) -> Any:
    """Mean pixel of each image, (1, 3) float."""
    from nvidia.dali import fn, types

    return fn.reshape(fn.reductions.mean(image, axes=[0, 1], dtype=types.FLOAT), shape=[1, 3])


def _affine(view: Any, a: Any, c: Any, image_mean: Any | None, place: Placement) -> Any:
    """A x + C m, rounded and clamped to uint8; m is the view's own mean where no image's is given.

    An argument of coord_transform has to be a CPU input, so on a GPU the shift, computed there, is added as a 1x1 image.
    """
    from nvidia.dali import fn, types

    shift = fn.coord_transform(_mean(view) if image_mean is None else image_mean, M=c)
    if place.device_id is None:
        return fn.coord_transform(view, M=a, T=fn.reshape(shift, shape=[3]), dtype=types.UINT8)
    moved = fn.coord_transform(view, M=a, dtype=types.FLOAT) + fn.reshape(shift, shape=[1, 1, 3])
    return fn.cast(moved, dtype=types.UINT8)


def _blur(view: Any, sigma: Any, taps: Any, place: Placement) -> Any:
    """Blurred where there is more than one tap. On a CPU even a pass of one tap costs a sixth of a view's time, so there
    DALI takes the batch apart and joins it again; on a GPU, where each part is a launch, one tap it is (neither measured)."""
    from nvidia.dali import fn

    if place.device_id is None:
        if taps > 1:
            view = fn.gaussian_blur(view, sigma=sigma, window_size=taps)
        return view
    return fn.gaussian_blur(view, sigma=sigma, window_size=taps)
