"""The DALI graph that turns encoded images into d views each; the same function builds it for CPU and GPU.

DALI is imported inside the functions that build the graph, so that a training step can be built and measured on a machine
without DALI.

The graph draws nothing at random: crop windows, colour matrices and blur widths are inputs, computed from the plan by
`view_arrays`. Each image is decoded once. Crop, resize and flip are one operation (a flip swaps the two ends of the window in
x), and all colour operations are one affine map. On a CPU a view without blur bypasses the blur; on a GPU it is blurred with
one tap, which leaves it unchanged.

Shapes: N images of this rank, d views, size S. The views are uint8 (N, S, S, 3), one output for each view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.config.schema import ViewsConfig
from trainer.data.color import color_matrices
from trainer.data.plan import Plan, crop_windows

_NO_LEVEL = 256  # no value of a pixel reaches it
Arrays = list[Any]  # one batched array, or list of encoded images, for each input of the graph
Source = Callable[[], Arrays]


@dataclass(frozen=True)
class Placement:
    """The device and the resources that DALI uses."""

    device_id: int | None
    """GPU number; None: CPU only."""
    threads: int
    """Number of CPU threads."""
    prefetch: int
    """Number of batches that DALI prepares ahead of the current one."""
    hw_decoder_load: float = 1.0
    """Share of the JPEGs that a GPU's hardware decoder decodes."""
    decoder_hint: tuple[int, int] = (0, 0)
    """Largest image width and height in pixels; a GPU's decoder allocates buffers for it at the start. 0: as needed."""


def has_color(recipe: ViewsConfig) -> bool:
    """Return whether the recipe ever changes colours; if not, the graph omits the operation."""
    # Jitter of strength 0 does nothing, however often it is applied.
    strengths = (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
    jitter = recipe.color_probability > 0 and any(strengths)
    return jitter or recipe.gray_probability > 0


def uses_image_mean(recipe: ViewsConfig) -> bool:
    """Return whether the colours of a view refer to the mean pixel of the whole image instead of its own."""
    return has_color(recipe) and recipe.order == "color_first"


def has_blur(recipe: ViewsConfig) -> bool:
    """Return whether the recipe blurs any view."""
    return np.max(recipe.blur_probability) > 0


def has_solarisation(recipe: ViewsConfig) -> bool:
    """Return whether the recipe solarises any view."""
    return np.max(recipe.solarize_probability) > 0


def view_arrays(
    plan: Plan,
    recipe: ViewsConfig,
    heights: NDArray[np.integer],
    widths: NDArray[np.integer],
) -> list[NDArray]:
    """Return the graph's inputs after the encoded images, in its order.

    For each view these are ROI start (N, 2), ROI end (N, 2), colour matrices A and C (N, 3, 3), blur sigma (N,), number of
    blur taps (N,), and the first level that is inverted (N,). A recipe without colour, blur or solarisation has no inputs for
    it. heights, widths: (N,) pixels of the images.
    """
    windows = crop_windows(plan, recipe, heights, widths)
    top, left, height, width = np.moveaxis(windows, -1, 0)
    # A window whose end lies left of its start is read from right to left, which flips the view.
    x = np.stack([left, left + width], axis=-1)
    x = np.where(plan.flip[..., None], x[..., ::-1], x)
    # DALI expects y before x.
    start = np.stack([top, x[..., 0]], axis=-1)
    end = np.stack([top + height, x[..., 1]], axis=-1)
    fields: list[NDArray] = [start.astype(np.float32), end.astype(np.float32)]
    if has_color(recipe):
        fields += color_matrices(plan, recipe)
    if has_blur(recipe):
        # 0.3 % of a Gaussian lies beyond 3 sigma: dropping it changes a photograph's pixel by 0.25 levels at most, 0.0015 on
        # average, and each tap costs 4 % of the time of a blurred view. A view without blur has sigma 0 and gets 1 tap.
        taps_within_3_sigma = 2 * np.ceil(3 * plan.blur_sigma) + 1
        taps = np.minimum(recipe.blur_window, taps_within_3_sigma)
        # DALI accepts no sigma of 0.
        sigma = np.maximum(plan.blur_sigma, 0.01)
        fields += [sigma.astype(np.float32), taps.astype(np.int32)]
    if has_solarisation(recipe):
        # A view that is not solarised gets a level that no pixel reaches.
        fields.append(np.where(plan.solarize, 128, _NO_LEVEL).astype(np.int32))
    # The fields are (N, d, ...); the graph takes all fields of view 0, then those of view 1, ...
    return [np.ascontiguousarray(f[:, view]) for view in range(recipe.num_views) for f in fields]


def eval_arrays(recipe: ViewsConfig, heights: NDArray[np.integer], widths: NDArray[np.integer]) -> list[NDArray]:
    """Return the graph's inputs for evaluation: ROI start and end, each (N, 2).

    One resize has the same effect as resizing the shorter side to `recipe.eval_resize` and cropping the centre. Sizes and
    offsets are rounded as torchvision rounds them.
    """
    size = np.stack([heights, widths], axis=-1).astype(np.int64)
    shorter_side = size.min(axis=-1, keepdims=True)
    # Size of the whole image after the resize, and the corner of the crop in it.
    resized = size * recipe.eval_resize // shorter_side
    corner = np.rint((resized - recipe.size) / 2)
    # Transform the crop back to pixels of the stored image.
    scale = size / resized
    start = (corner * scale).astype(np.float32)
    end = ((corner + recipe.size) * scale).astype(np.float32)
    return [start, end]


def eval_recipe(recipe: ViewsConfig) -> ViewsConfig:
    """Return the recipe without augmentation: one view, no colour operations, no blur."""
    return replace(
        recipe,
        num_views=1,
        color_probability=0.0,
        gray_probability=0.0,
        blur_probability=0.0,
        solarize_probability=0.0,
    )


def view_pipeline(
    recipe: ViewsConfig,
    batch_size: int,
    place: Placement,
    source: Source,
    *,
    decoded_on: Literal["cpu", "gpu"] | None = None,
    ends_at_resize: bool = False,
) -> Any:
    """Build a DALI pipeline whose outputs are the d views, uint8 (N, S, S, 3), on the placement's device.

    source: called for each batch; returns [encoded images (a list of uint8 arrays), *view_arrays(...)].
    decoded_on: where the pixels (H, W, 3) are that `source` returns instead of encoded images; None: it returns encoded images.
    ends_at_resize: leave the rest to `trainer.data.augment`. `source` then returns start and end of each view only. If the
        colours refer to the whole image, one more output is its mean pixel, (N, 1, 3) float.
    """
    from nvidia.dali import fn, pipeline_def

    color = has_color(recipe) and not ends_at_resize
    blur = has_blur(recipe) and not ends_at_resize
    solarise = has_solarisation(recipe) and not ends_at_resize
    # ROI start and end; A and C; sigma and taps; level.
    inputs_per_view = 2 + 2 * color + 2 * blur + solarise

    # stream_policy keeps DALI's default. A GPU's JPEG engine does not follow the order of a stream: with StreamPolicy.SINGLE
    # it could write into memory that the same stream had just released.
    @pipeline_def(
        batch_size=batch_size,
        num_threads=place.threads,
        device_id=place.device_id,
        prefetch_queue_depth=place.prefetch,
        enable_conditionals=True,
    )
    def graph() -> tuple[Any, ...]:
        # The images are the first input, then come the inputs of each view.
        num_inputs = 1 + inputs_per_view * recipe.num_views
        if decoded_on == "gpu":
            # Inputs on different devices need a source each.
            images_alone, arrays_alone = _split(source)
            encoded = fn.external_source(source=images_alone, batch=True, device="gpu")
            arrays = fn.external_source(source=arrays_alone, num_outputs=num_inputs - 1, batch=True)
            image = fn.reshape(encoded, layout="HWC")
        else:
            encoded, *arrays = fn.external_source(source=source, num_outputs=num_inputs, batch=True)
            image = on_device(encoded, place) if decoded_on else decode(encoded, place)
        image_mean = _mean(image) if uses_image_mean(recipe) else None
        views = []
        for view in range(recipe.num_views):
            first_input = view * inputs_per_view
            start, end, *rest = arrays[first_input : first_input + inputs_per_view]
            v = _resize(image, start, end, recipe)
            # A and C follow start and end, then come sigma and taps, and the level.
            if color:
                v = _affine(v, rest[0], rest[1], image_mean, place)
            if blur:
                v = _blur(v, rest[2 * color], rest[2 * color + 1], place)
            if solarise:
                v = _solarise(v, rest[-1], place)
            views.append(v)
        if ends_at_resize and image_mean is not None:
            views.append(image_mean)
        return tuple(views)

    # Building the pipeline allocates its buffers and starts its threads.
    pipe = graph()
    pipe.build()
    return pipe


def _split(source: Source) -> tuple[Callable[[], Any], Source]:
    """Divide a source into one of the images and one of the other inputs, which may be called in any order."""
    images: deque[Any] = deque()
    others: deque[Arrays] = deque()

    def take(waiting: deque[Any]) -> Any:
        if not waiting:
            first, *rest = source()
            images.append(first)
            others.append(rest)
        return waiting.popleft()

    return lambda: take(images), lambda: take(others)


def decode(encoded: Any, place: Placement) -> Any:
    """Decode whole images to RGB pixels as stored, ignoring the EXIF orientation.

    Images are always decoded as a whole: nvImageCodec 0.9, which DALI 2.4 needs, is reported to end the process when an H100
    decodes a window of a JPEG, even one as large as the image.

    The decoder's input is made to depend on the image's shape, so DALI has to read the shape first. Bytes that are not an
    image raise an error there and never reach a decoder.
    """
    from nvidia.dali import fn, types

    shape = fn.peek_image_shape(encoded, adjust_orientation=False)
    # This is -1 whatever the shape is. reshape replaces -1 by the number of bytes and copies nothing.
    height = fn.slice(shape, start=[0], shape=[1], axes=[0])
    same_length = fn.cast(height * 0 - 1, dtype=types.INT32)
    on_gpu = {} if place.device_id is None else _gpu_decoder(place)
    return fn.decoders.image(
        fn.reshape(encoded, shape=same_length),
        adjust_orientation=False,
        output_type=types.RGB,
        device="cpu" if place.device_id is None else "mixed",
        **on_gpu,
    )


def on_device(pixels: Any, place: Placement) -> Any:
    """Move images that are already decoded to the device on which the rest of the graph runs."""
    from nvidia.dali import fn

    pixels = fn.reshape(pixels, layout="HWC")  # without a layout a blur would mix the channels
    return pixels if place.device_id is None else pixels.gpu()


def _gpu_decoder(place: Placement) -> dict[str, Any]:
    """Return the additional arguments of a decoder on a GPU."""
    arguments: dict[str, Any] = {"hw_decoder_load": place.hw_decoder_load}
    # Without a hint the decoder allocates its buffers when the first images arrive.
    width, height = place.decoder_hint
    if width and height:
        arguments["preallocate_width_hint"] = width
        arguments["preallocate_height_hint"] = height
    return arguments


def _mean(image: Any) -> Any:
    """Return the mean pixel of each image, (1, 3) float."""
    from nvidia.dali import fn, types

    # coord_transform takes pixels in rows, so the mean is a single row.
    mean = fn.reductions.mean(image, axes=[0, 1], dtype=types.FLOAT)
    return fn.reshape(mean, shape=[1, 3])


def _resize(image: Any, start: Any, end: Any, recipe: ViewsConfig) -> Any:
    """Crop each image to the window from `start` to `end` and resize it to the size of a view."""
    from nvidia.dali import fn, types

    interpolations = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}
    # DALI resizes the window itself, so no crop is copied.
    return fn.resize(
        image,
        size=(recipe.size, recipe.size),
        roi_start=start,
        roi_end=end,
        antialias=True,
        interp_type=interpolations[recipe.interpolation],
    )


def _affine(view: Any, a: Any, c: Any, image_mean: Any | None, place: Placement) -> Any:
    """Return A x + C m, rounded and clamped to uint8. m is `image_mean` or, if that is None, the view's own mean.

    An argument of coord_transform has to be a CPU input. On a GPU the shift C m is computed on the GPU, so it is added as a 1x1
    image instead.
    """
    from nvidia.dali import fn, types

    # C m has the shape of one pixel.
    shift = fn.coord_transform(_mean(view) if image_mean is None else image_mean, M=c)
    if place.device_id is None:
        return fn.coord_transform(view, M=a, T=fn.reshape(shift, shape=[3]), dtype=types.UINT8)
    scaled = fn.coord_transform(view, M=a, dtype=types.FLOAT)
    moved = scaled + fn.reshape(shift, shape=[1, 1, 3])
    return fn.cast(moved, dtype=types.UINT8)


def _blur(view: Any, sigma: Any, taps: Any, place: Placement) -> Any:
    """Blur the views that have more than one tap.

    On a CPU even a pass with one tap takes a sixth of a view's time, so DALI splits the batch there, blurs one part and joins
    the parts again. On a GPU each part would be another kernel launch, so all views are blurred, some with one tap. (Neither
    was measured on a GPU.)
    """
    from nvidia.dali import fn

    if place.device_id is None:
        if taps > 1:
            view = fn.gaussian_blur(view, sigma=sigma, window_size=taps)
        return view
    return fn.gaussian_blur(view, sigma=sigma, window_size=taps)


def _solarise(view: Any, level: Any, place: Placement) -> Any:
    """Invert the values of a view from `level` on. On a CPU only the views that are solarised pass through this."""
    if place.device_id is None:
        if level < _NO_LEVEL:
            view = _inverted_from(view, level)
        return view
    return _inverted_from(view, level)


def _inverted_from(view: Any, level: Any) -> Any:
    from nvidia.dali import fn, types

    # 255 - x is x with all bits inverted.
    mask = fn.cast((view >= level) * 255, dtype=types.UINT8)
    return view ^ mask
