"""DALI's views equal torchvision's of the same plan. Differences are in levels of 255 and leave out the border.

At the border DALI's filter uses pixels outside of the crop, which torchvision has cut off.
"""

import functools
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from drawing import smooth_picture
from nvidia.dali import Pipeline, fn
from nvidia.dali.backend import GetSchema
from pictures import encoded as encode
from pictures import image, shared
from PIL import Image

from tests.conftest import ROOT
from trainer.config.schema import ViewsConfig
from trainer.data.color import color_matrices
from trainer.data.dali_graph import Placement, decode, view_arrays
from trainer.verify.dali_views import dali_eval, dali_run, dali_views, draw_plan, sizes
from trainer.verify.reference_views import reference_views

BORDER = 16
PLAIN = ViewsConfig(num_views=2, size=96, color_probability=0.0, gray_probability=0.0, blur_probability=0.0)
BLURRED = replace(PLAIN, blur_probability=0.5)
MILD = replace(
    PLAIN, color_probability=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.0, gray_probability=0.1
)
STRONG = replace(MILD, brightness=0.8, contrast=0.8, saturation=0.8, gray_probability=0.2)


@functools.cache
def pictures(source: str) -> list[bytes]:
    """Return the encoded images of a source: the photographs, or 24 generated ones."""
    if source == "photographs":
        files = sorted((shared("photos") / "train").glob("*/*"))
        return [file.read_bytes() for file in files]
    rng = np.random.default_rng(0)
    return [smooth_picture(seed, *rng.integers(110, 400, 2)) for seed in range(24)]


def difference(recipe: ViewsConfig, source: str) -> torch.Tensor:
    """Return the mean absolute difference of each view inside the border, (d, N)."""
    encoded = pictures(source)[:: 4 if recipe.order == "color_first" else 1]  # torchvision is slow on whole images
    plan = draw_plan(recipe, len(encoded))
    views, expected = dali_views(encoded, plan, recipe), reference_views(encoded, plan, recipe)
    assert views.dtype == torch.uint8
    assert views.shape == expected.shape
    inside = slice(BORDER, -BORDER)
    return (views.float() - expected.float())[..., inside, inside].abs().mean((2, 3, 4))


@pytest.fixture(params=["photographs", "generated"])
def source(request):
    """Return the name of a source of images."""
    return request.param


@pytest.mark.parametrize("recipe", [PLAIN, BLURRED], ids=["plain", "blur"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_crop_resize_flip_and_blur_equal_torchvision(recipe, interpolation, source):
    """The bound is for the largest difference of a view, because one wrong view hardly changes the mean."""
    assert difference(replace(recipe, interpolation=interpolation), source).max() < 0.5


@pytest.mark.parametrize(
    ("recipe", "order", "bound"),
    [
        (MILD, "crop_first", 1.5),
        (STRONG, "crop_first", 1.5),
        (MILD, "color_first", 1.5),
        (replace(MILD, blur_probability=0.5), "crop_first", 1.5),
    ],
)
def test_colour_without_hue_equals_torchvision(recipe, order, bound, source):
    d = difference(replace(recipe, order=order), source)
    assert d.mean() < bound
    assert d.median() < 0.5  # views differ only where torchvision clamps an intermediate result


@pytest.mark.parametrize(("recipe", "bound"), [(replace(MILD, hue=0.1), 4.0), (replace(STRONG, hue=0.2), 6.0)])
def test_colour_with_hue_is_close_to_torchvision(recipe, bound, source):
    """Hue is a rotation about the grey axis here and in the HSV hexagon there; docs/views.md has the figures."""
    assert difference(recipe, source).mean() < bound


def test_a_small_recipe_with_colour_first_is_close_to_torchvision():
    recipe = replace(MILD, size=64, order="color_first", crop_area=(0.2, 1.0), hue=0.1)
    assert difference(recipe, "generated").mean() < 4.0


def test_the_coloured_view_is_the_affine_map_of_the_uncoloured_one():
    """This holds up to rounding at every pixel, so only the map makes a difference to torchvision."""
    recipe = replace(STRONG, hue=0.2)
    encoded = pictures("generated")
    plan = draw_plan(recipe, len(encoded))
    before = dali_views(encoded, plan, PLAIN).double().permute(1, 0, 3, 4, 2)  # (N, d, S, S, 3)
    a, c = (torch.from_numpy(x).double() for x in color_matrices(plan, recipe))
    shift = torch.einsum("ndij,ndj->ndi", c, before.mean((2, 3)))
    expected = (torch.einsum("ndij,ndhwj->ndhwi", a, before) + shift[:, :, None, None]).clamp(0, 255)
    got = dali_views(encoded, plan, recipe).double().permute(1, 0, 3, 4, 2)
    assert (got - expected).abs().max() < 0.51


def test_blur_and_solarisation_have_a_probability_for_each_view(source):
    """Every value from 128 on is inverted, and no other. The difference to torchvision is that of the views before it."""
    recipe = replace(PLAIN, blur_probability=(1.0, 0.5), solarize_probability=(0.0, 0.5))
    encoded = pictures(source)[:24]
    plan = draw_plan(recipe, len(encoded))
    assert (plan.blur_sigma > 0).all(0).tolist() == [True, False]
    assert plan.solarize[:, 0].sum() == 0
    assert 0 < plan.solarize[:, 1].sum() < len(encoded)
    assert (plan.solarize & (plan.blur_sigma > 0.5)).any()  # solarisation comes after the blur
    before = dali_views(encoded, plan, replace(recipe, solarize_probability=0.0))
    solarised = torch.from_numpy(plan.solarize.T)[..., None, None, None]
    expected = torch.where(solarised & (before >= 128), 255 - before, before)
    assert torch.equal(dali_views(encoded, plan, recipe), expected)
    assert (expected != before).any()
    # A pixel near 128 may lie on either side in the two programs, so only most pixels agree.
    reference = reference_views(encoded, plan, recipe)
    assert ((expected.int() - reference.int()).abs() <= 2).float().mean() > 0.97


def test_a_view_without_blur_is_unchanged():
    encoded = pictures("generated")
    plan = draw_plan(BLURRED, len(encoded))
    same = (dali_views(encoded, plan, BLURRED) == dali_views(encoded, plan, PLAIN)).all(-1).all(-1).all(-1)
    sharp = torch.from_numpy(plan.blur_sigma == 0).T
    assert sharp.any()
    assert same[sharp].all()
    assert not same[torch.from_numpy(plan.blur_sigma > 0.5).T].any()


def test_a_batch_may_have_all_views_blurred_or_none():
    """The graph passes only the views with a blur to the filter: here all of a batch, or none."""
    encoded = pictures("generated")[:4]
    for sigma in (0.0, 1.5):
        plan = draw_plan(BLURRED, 4)
        plan = plan._replace(blur_sigma=np.full_like(plan.blur_sigma, sigma))
        same = torch.equal(dali_views(encoded, plan, BLURRED), dali_views(encoded, plan, PLAIN))
        assert same == (sigma == 0)


def test_a_blur_window_of_three_sigma_is_enough():
    """The views hardly differ from those with all 23 taps."""
    encoded = pictures("photographs")[::10]
    plan = draw_plan(replace(BLURRED, size=224), len(encoded))
    heights, widths = sizes(encoded)
    arrays = view_arrays(plan, BLURRED, heights, widths)
    for taps in (3, 7):  # each view has the arrays start, end, sigma and taps
        assert arrays[taps].max() <= 13
    full = [np.full_like(x, 23) if i % 4 == 3 else x for i, x in enumerate(arrays)]
    cut, whole = (dali_run(encoded, replace(BLURRED, size=224), x).float() for x in (arrays, full))
    blurred = torch.from_numpy(plan.blur_sigma > 0).T
    difference = (cut - whole)[blurred].abs()
    assert difference.max() <= 1  # one level, from rounding
    assert difference.mean() < 0.01


def test_the_decoder_gets_gpu_settings_only_on_a_gpu(monkeypatch):
    """DALI's operator knows all of these arguments."""
    given = {}
    monkeypatch.setattr(fn.decoders, "image", lambda *_, **arguments: given.update(arguments))
    with Pipeline(batch_size=1, num_threads=1, device_id=None):
        encoded = fn.external_source(name="encoded")
        decode(encoded, Placement(0, 2, 2, 0.8, (5980, 6430)))
        assert given.pop("device") == "mixed"
        hardware = {"hw_decoder_load": 0.8, "preallocate_width_hint": 5980, "preallocate_height_hint": 6430}
        assert hardware.items() <= given.items()
        assert given.keys() <= set(GetSchema("decoders__Image").GetArgumentNames())
        given.clear()
        decode(encoded, Placement(0, 2, 2, 0.5))
        assert "preallocate_width_hint" not in given
        given.clear()
        decode(encoded, Placement(None, 2, 2, 0.8, (5980, 6430)))
        assert not hardware.keys() & given.keys()


def test_images_are_always_decoded_whole():
    """Decoding a window with nvImageCodec 0.9 is reported to crash on an H100, which no test on a CPU shows."""
    decoders = ("image_slice", "image_crop", "image_random_crop")
    # peers/ may: it measures DALI as others use it
    files = [file for file in (ROOT / "trainer").rglob("*.py") if "peers" not in file.parts]
    assert len(files) > 60
    assert [(file.name, name) for file in files for name in decoders if name in file.read_text()] == []


def test_views_of_one_image_differ():
    encoded = pictures("generated")
    views = dali_views(encoded, draw_plan(PLAIN, len(encoded)), PLAIN)
    assert (views[0] != views[1]).flatten(1).any(1).all()


@pytest.mark.parametrize("order", ["crop_first", "color_first"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 4000), (4000, 3), (2, 2)])
def test_images_of_extreme_shapes_are_drawn(height, width, order):
    encoded = [encode("PNG", image(height=height, width=width, seed=seed)) for seed in range(3)]
    recipe = replace(MILD, blur_probability=0.5, size=32, order=order)
    plan = draw_plan(recipe, 3)
    views = dali_views(encoded, plan, recipe)
    assert views.shape == (2, 3, 3, 32, 32)
    if (height, width) == (1, 1):  # no pixels outside of the crop: the border equals torchvision's too
        assert (views.float() - reference_views(encoded, plan, recipe).float()).abs().max() <= 2


def test_exif_orientation_is_never_applied():
    exif = Image.Exif()
    exif[0x112] = 6
    turned, plain = (encode("JPEG", image(height=60, width=90), exif=e) for e in (exif, Image.Exif()))
    recipe = replace(PLAIN, size=32)
    plan = draw_plan(recipe, 2)
    plan = plan._replace(**{n: getattr(plan, n)[[0, 0]] for n in plan._fields[3:]})
    views = dali_views([turned, plain], plan, recipe)
    assert torch.equal(views[:, 0], views[:, 1])


SIZES = [(256, 256), (300, 500), (500, 300), (333, 257), (225, 1000), (90, 60), (224, 224), (1000, 256)]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_evaluation_is_resize_256_and_centre_crop_224(interpolation):
    encoded = [smooth_picture(seed, *size) for seed, size in enumerate(SIZES)]
    views = dali_eval(encoded, ViewsConfig(size=224, eval_resize=256, interpolation=interpolation))
    mode = {"bicubic": F.InterpolationMode.BICUBIC, "bilinear": F.InterpolationMode.BILINEAR}[interpolation]
    for view, data, size in zip(views, encoded, SIZES, strict=True):
        picture = F.resize(Image.open(io.BytesIO(data)), 256, mode)
        expected = F.pil_to_tensor(F.center_crop(picture, 224))
        assert (view.float() - expected.float()).abs().mean() < 0.6, size  # a shift by half a pixel gives more than 2


def test_evaluation_of_photographs_is_within_2_levels_of_pillow():
    encoded = pictures("photographs")[::10]
    views = dali_eval(encoded, ViewsConfig(size=224, eval_resize=256))
    for view, data in zip(views, encoded, strict=True):
        picture = F.resize(Image.open(io.BytesIO(data)).convert("RGB"), 256, F.InterpolationMode.BICUBIC)
        assert (view.float() - F.pil_to_tensor(F.center_crop(picture, 224)).float()).abs().mean() < 2


def test_images_of_the_evaluation_size_are_not_resized():
    pixels = image(height=32, width=32)
    view = dali_eval([encode("PNG", pixels)], ViewsConfig(size=32, eval_resize=32))[0]
    assert torch.equal(view, F.pil_to_tensor(pixels))
