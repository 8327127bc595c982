"""Colour, blur and solarisation outside of DALI's graph: the definition equals DALI's graph, the kernels the definition.

The kernels are compiled on a GPU, interpreted on a CPU. Differences are in levels of 255.
"""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kernels.augment_reference import LEVEL, SIGMA, TAPS, augment, no_augmentation
from tests.conftest import ROOT
from tests.data.drawing import smooth_picture
from trainer.config.checks import MOST_TAPS_TRITON
from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.dali_graph import view_arrays
from trainer.data.index import open_index
from trainer.data.loader import Batch, ViewLoader, train_requests
from trainer.data.plan import Planner
from trainer.distributed.ranks import ImageRange
from trainer.models.encoder import Normalize
from trainer.verify.dali_views import dali_run, draw_plan, sizes

augment_triton = pytest.importorskip("kernels.augment_triton", reason="the Triton kernels need the package triton")
split_choices = pytest.importorskip("trainer.data.augment").split_choices

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CPU = torch.device("cpu")
NORMALISED = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PLAIN = ViewsConfig(
    num_views=2, size=40, color_probability=0.0, gray_probability=0.0, blur_probability=0.0, **NORMALISED
)
COLOR = replace(PLAIN, color_probability=0.8)
ALL = replace(COLOR, gray_probability=0.2, blur_probability=(1.0, 0.5), solarize_probability=0.5)
RECIPES = {
    "resize alone": PLAIN,
    "colour": COLOR,
    "grey": replace(PLAIN, gray_probability=0.5),
    "blur": replace(PLAIN, blur_probability=(1.0, 0.5)),
    "solarise": replace(PLAIN, solarize_probability=0.5),
    "colour first": replace(COLOR, order="color_first"),
    "all": ALL,
    "all, colour first, 33 px": replace(ALL, order="color_first", size=33),
    "all, 8 px": replace(ALL, size=8),
}
IMAGES = 8


def pictures() -> list[bytes]:
    """Return encoded pictures of several sizes."""
    rng = np.random.default_rng(0)
    return [smooth_picture(seed, *rng.integers(50, 120, 2)) for seed in range(IMAGES)]


def stages(recipe: ViewsConfig) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return DALI's views after the resize, the choices, the mean pixels or None, and DALI's finished views, of one plan.

    The views are (R, 3, S, S) uint8.
    """
    encoded = pictures()
    plan = draw_plan(recipe, IMAGES)
    arrays = view_arrays(plan, recipe, *sizes(encoded))
    windows, choices = split_choices(arrays, recipe)
    plain = replace(recipe, color_probability=0.0, gray_probability=0.0, blur_probability=0.0, solarize_probability=0.0)
    means = None
    if recipe.order == "color_first":
        pixels = [np.asarray(Image.open(io.BytesIO(data))) for data in encoded]
        means = torch.tensor(np.array([image.mean((0, 1)) for image in pixels])).repeat(recipe.num_views, 1)
    before = dali_run(encoded, plain, windows).flatten(0, 1)
    return before, torch.from_numpy(choices), means, dali_run(encoded, recipe, arrays).flatten(0, 1)


def reference(before: Tensor, choices: Tensor, means: Tensor | None, recipe: ViewsConfig) -> Tensor:
    """Return the views of the definition in float64."""
    scale = Normalize(recipe).double()
    return augment(before, choices.double(), scale.factor.flatten(), scale.shift.flatten(), means)


def by_kernels(
    before: Tensor, choices: Tensor, means: Tensor | None, recipe: ViewsConfig, dtype: torch.dtype
) -> Tensor:
    """Return the views of the kernels, (R, 3, S, S), on the CPU."""
    scale = Normalize(recipe)
    normalisation = torch.stack([scale.factor.flatten(), scale.shift.flatten()]).to(DEVICE)
    views = [view.contiguous().to(DEVICE) for view in before.permute(0, 2, 3, 1).chunk(recipe.num_views)]
    # A value that is written nowhere would stay NaN.
    out = torch.full((len(before), recipe.size, recipe.size, 3), float("nan"), dtype=dtype, device=DEVICE)
    means = None if means is None else means.float().to(DEVICE)
    color = bool(recipe.color_probability or recipe.gray_probability)
    augment_triton.augment(views, choices.numpy(), normalisation, out, color=color, means=means)
    return out.permute(0, 3, 1, 2).cpu()


def levels(views: Tensor, recipe: ViewsConfig) -> Tensor:
    """Return the levels of normalised views, not rounded."""
    scale = Normalize(recipe).double()
    return (views.double() - scale.shift) / scale.factor


@pytest.mark.parametrize("name", RECIPES)
def test_the_definition_equals_dalis_graph(name: str) -> None:
    """A result near the middle between two levels may be rounded to either; more than one level apart is a mistake."""
    recipe = RECIPES[name]
    *inputs, expected = stages(recipe)
    found = levels(reference(*inputs, recipe), recipe)
    assert (found - found.round()).abs().max() < 1e-4
    difference = (found.round() - expected).abs()
    share = (difference > 0).double().mean().item()
    print(f"| {name} | {100 * share:.3f} | {difference.mean():.5f} | {difference.max():.0f} |")
    assert difference.max() <= 1
    assert share < 0.002
    assert name == "resize alone" or not torch.equal(expected, inputs[0])


@pytest.mark.parametrize("name", ["colour", "blur", "all", "all, colour first, 33 px", "all, 8 px"])
def test_the_kernels_equal_the_definition(name: str) -> None:
    """The blur multiplies in fp16, so some results near the middle between two levels are rounded to the other one."""
    recipe = RECIPES[name]
    *inputs, _ = stages(recipe)
    expected = reference(*inputs, recipe)
    found = by_kernels(*inputs, recipe, torch.float32)
    difference = (levels(found, recipe) - levels(expected, recipe)).abs()
    moved = difference > 0.5
    share = moved.double().mean().item()
    print(f"| {name} | {100 * share:.3f} | {difference[~moved].max():.1e} |")
    assert difference[~moved].max() < 1e-3
    assert difference.max() < 1.001
    assert share < 0.02
    # The other data types are rounded from the same values. (The interpreter cuts bf16 off instead of rounding it.)
    for dtype, bound in ((torch.bfloat16, 2.0**-8 if ON_GPU else 2.0**-7), (torch.float16, 2.0**-11)):
        rounded = by_kernels(*inputs, recipe, dtype)
        assert rounded.dtype == dtype
        error = (rounded.double() - found.double()).abs()
        of_definition = (rounded.double() - expected).abs()
        print(f"|  {dtype} | {error.max():.1e} | {of_definition.max():.1e} | {of_definition.mean():.1e} |")
        assert (error <= bound * found.double().abs() + 1e-7).all()


def test_a_view_without_blur_does_not_depend_on_the_blur_of_others() -> None:
    """Views without a blur have the same bits, whatever the choices of the others are."""
    before, choices, means, _ = stages(ALL)
    without = choices.clone()
    without[:, TAPS] = 1
    changed = by_kernels(before, choices, means, ALL, torch.float32)
    plain = by_kernels(before, without, means, ALL, torch.float32)
    is_blurred = choices[:, TAPS] > 1
    assert 0 < is_blurred.sum() < len(choices)
    same = (changed == plain).flatten(1).all(1)
    assert same[~is_blurred].all()
    assert not same[is_blurred & (choices[:, SIGMA] > 0.5)].any()


def test_the_same_input_gives_the_same_bits() -> None:
    inputs = stages(ALL)[:3]
    first, second = (by_kernels(*inputs, ALL, torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("taps", [25, 23])
def test_the_largest_blur_is_computed_over_several_tiles(taps: int) -> None:
    """The view is larger than a tile, and its border is mirrored. An area of one colour stays as it is."""
    recipe = replace(PLAIN, size=70)
    before = torch.randint(0, 256, (2, 3, 70, 70), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before[1] = 200
    choices = torch.from_numpy(no_augmentation(2))
    choices[:, TAPS] = taps
    choices[:, SIGMA] = 4.0
    found = levels(by_kernels(before, choices, None, recipe, torch.float32), recipe)
    expected = levels(reference(before, choices, None, recipe), recipe)
    assert (found - expected).abs().max() < 1.001
    assert (found - expected).abs().mean() < 0.01
    torch.testing.assert_close(found[1], before[1].double(), rtol=0, atol=1e-3)


def test_a_blur_beyond_the_tile_is_refused() -> None:
    choices = torch.from_numpy(no_augmentation(2))
    choices[:, TAPS] = 27
    assert augment_triton.MOST_TAPS == MOST_TAPS_TRITON  # so that the settings are refused before
    with pytest.raises(ValueError, match="27 taps: the kernels take at most 25"):
        by_kernels(torch.zeros(2, 3, 40, 40, dtype=torch.uint8), choices, None, PLAIN, torch.float32)


def test_solarisation_inverts_from_its_level_on() -> None:
    choices = torch.from_numpy(no_augmentation(2))
    choices[0, LEVEL] = 128
    before = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(2, 3, 16, 16)
    recipe = replace(PLAIN, size=16)
    found = levels(by_kernels(before, choices, None, recipe, torch.float32), recipe).round()
    expected = before.double().clone()
    expected[0] = torch.where(expected[0] >= 128, 255 - expected[0], expected[0])
    assert torch.equal(found, expected)


# --- the loader ---

PER_STEP = 4


def batches(
    root: Path, recipe: ViewsConfig, dtype: torch.dtype | None, sizes: tuple[tuple[int, int], ...]
) -> list[Batch]:
    """Return copies of the batches of three steps."""
    index = open_index(root, "train")
    planner = Planner(recipe, seed=0, num_images=len(index), images_per_step=PER_STEP, images=ImageRange(0, PER_STEP))
    # A loader made for larger batches than it gets.
    loader = ViewLoader(
        index,
        recipe,
        DataConfig(threads=1),
        train_requests(planner, sizes),
        batch_size=PER_STEP + 1,
        device=DEVICE,
        first_step=0,
        end_step=3,
        sizes=sizes,
        views_dtype=dtype,
    )
    return [batch._replace(views=batch.views.cpu().clone()) for batch in loader]


@pytest.mark.parametrize(
    ("recipe", "dtype", "sizes"),
    [
        (replace(ALL, size=24), torch.float32, ((0, 16), (2, 24))),
        (replace(ALL, size=24, order="color_first"), torch.bfloat16, ()),
        (replace(PLAIN, size=24), torch.float16, ()),
    ],
    ids=["early sizes", "colour first", "plain"],
)
def test_the_loader_gives_the_same_views_with_either_backend(
    tiny_set: Path, recipe: ViewsConfig, dtype: torch.dtype, sizes: tuple[tuple[int, int], ...]
) -> None:
    by_dali = batches(tiny_set, recipe, None, sizes)
    by_triton = batches(tiny_set, recipe, dtype, sizes)
    normalize = Normalize(recipe, passes_floats=True)
    assert len(by_dali) == len(by_triton) == 3
    for expected, found in zip(by_dali, by_triton, strict=True):
        assert expected.image_ids.tolist() == found.image_ids.tolist()
        assert found.views.dtype == dtype
        assert found.views.shape == expected.views.shape
        assert found.views.is_contiguous(memory_format=torch.channels_last)
        difference = (normalize.undo(found.views).int() - expected.views.int()).abs()
        assert difference.max() <= 1 + (dtype == torch.bfloat16)  # the interpreter cuts bf16 off
        if dtype != torch.bfloat16:
            assert (difference > 0).float().mean() < 0.02
        # The networks take both.
        assert normalize(found.views) is found.views


# --- compiled for a GPU ---


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton has an assembler on Linux only")
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_without_spilling(capability: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.numerics.compile_kernels", capability, "views:224"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    # for each data type, with and without colours; the code is the same for views of any size
    assert [kernel["kernel"] for kernel in kernels] == ["view_means", "sharp", "blurred", "sharp", "blurred"] * 3
    most = {"view_means": 64, "sharp": 80, "blurred": 128}  # so that at least two programs fit on a multiprocessor
    for kernel in kernels:
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= most[kernel["kernel"]]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: kernels are interpreted here")
def test_the_augmentation_does_not_synchronize_with_the_device() -> None:
    choices = no_augmentation(2)
    choices[1, [SIGMA, TAPS]] = 2.0, 13.0
    views = [torch.zeros(1, 32, 32, 3, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    out = torch.empty(2, 32, 32, 3, device=DEVICE)
    normalisation = torch.ones(2, 3, device=DEVICE)
    augment_triton.augment(views, choices, normalisation, out, color=True)  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        augment_triton.augment(views, choices, normalisation, out, color=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
