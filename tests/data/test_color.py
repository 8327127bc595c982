"""The colour matrices do each operation as torchvision does, in the plan's order, and rotate hue by the right angle."""

import colorsys
import itertools

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F

from trainer.config.schema import ViewsConfig
from trainer.data.color import color_matrices
from trainer.data.plan import Plan
from trainer.verify.dali_views import draw_plan

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
NEUTRAL = (1.0, 1.0, 1.0, 0.0)
OPERATIONS = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def plan_of(factors: tuple, order=(0, 1, 2, 3), *, jitter: bool = True, gray: bool = False) -> Plan:
    """Return a plan of one view of one image."""
    return draw_plan(ViewsConfig(num_views=1), 1)._replace(
        factors=np.array([[factors]], float),
        factor_order=np.array([[order]]),
        jitter=np.array([[jitter]]),
        gray=np.array([[gray]]),
    )


def apply(plan: Plan, pixels: torch.Tensor, pivot: str = "gray") -> torch.Tensor:
    """Return A x + C m for the pixels x, (3, H, W), and their mean m, without clamping."""
    a, c = (torch.from_numpy(x[0, 0]) for x in color_matrices(plan, ViewsConfig(contrast_pivot=pivot)))
    return torch.einsum("ij,jhw->ihw", a, pixels) + (c @ pixels.mean((1, 2)))[:, None, None]


def patch(low: float = 0.3, high: float = 0.6) -> torch.Tensor:
    """Return pixels that stay within 0..1 under all factors below, because torchvision clamps beyond."""
    return low + (high - low) * torch.rand(3, 9, 11, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("value", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("which", [BRIGHTNESS, CONTRAST, SATURATION])
def test_one_operation_equals_torchvision(which, value):
    factors = list(NEUTRAL)
    factors[which] = value
    expected = OPERATIONS[which](patch(), value)
    torch.testing.assert_close(apply(plan_of(factors), patch()), expected, atol=2e-6, rtol=0)


def test_grey_equals_torchvision_and_is_applied_after_the_jitter():
    brighter = F.adjust_brightness(patch(), 1.3)
    expected = F.rgb_to_grayscale(brighter, num_output_channels=3)
    torch.testing.assert_close(apply(plan_of((1.3, 1, 1, 0), gray=True), patch()), expected, atol=1e-4, rtol=0)
    alone = apply(plan_of((1.3, 1, 1, 0.1), jitter=False, gray=True), patch())
    torch.testing.assert_close(alone, F.rgb_to_grayscale(patch(), num_output_channels=3), atol=1e-4, rtol=0)


def test_without_jitter_and_grey_the_matrices_are_the_identity():
    a, c = color_matrices(plan_of((1.3, 0.7, 1.2, 0.1), jitter=False), ViewsConfig())
    np.testing.assert_array_equal(a[0, 0], np.eye(3))
    assert not c.any()


def rotate_hue(pixels: torch.Tensor, hue: float) -> torch.Tensor:
    """Rotate colours about (1, 1, 1), by the exponential of the rotation's generator. hue: in turns."""
    generator = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / 3**0.5
    return torch.einsum("ij,jhw->ihw", torch.matrix_exp(2 * torch.pi * hue * generator), pixels)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_operations_apply_in_the_drawn_order(order):
    """The order shows where hue is involved: without clamping, the other three commute (saturation keeps the grey mean)."""
    values = (1.2, 0.6, 1.3, 0.15)
    expected = patch()
    for which in order:
        expected = (*OPERATIONS[:HUE], rotate_hue)[which](expected, values[which])
    torch.testing.assert_close(apply(plan_of(values, order), patch()), expected, atol=1e-5, rtol=0)
    reverse = apply(plan_of(values, order[::-1]), patch())
    if order.index(HUE) in (0, 3):
        assert (reverse - expected).abs().max() > 0.01


def angle(rgb: np.ndarray) -> np.ndarray:
    """Return the angle of a colour about the grey axis in degrees; red is 0, green 120."""
    r, g, b = rgb
    return np.degrees(np.arctan2(np.sqrt(3) * (g - b), 2 * r - g - b))


@pytest.mark.parametrize("rgb", [(0.8, 0.3, 0.25), (0.3, 0.7, 0.4), (0.25, 0.35, 0.75), (0.6, 0.6, 0.2)])
@pytest.mark.parametrize("hue", [0.1, -0.2])
def test_a_hue_of_a_tenth_is_36_degrees(rgb, hue):
    before = torch.tensor(rgb).view(3, 1, 1)
    after = apply(plan_of((1, 1, 1, hue)), before)
    turned = angle(after.flatten().numpy()) - angle(np.array(rgb))
    assert (turned - 360 * hue + 180) % 360 - 180 == pytest.approx(0, abs=0.01)
    assert after.mean().item() == pytest.approx(np.mean(rgb), abs=1e-6)

    h, s, v = colorsys.rgb_to_hsv(*rgb)
    hsv = np.array(colorsys.hsv_to_rgb((h + hue) % 1, s, v))
    np.testing.assert_allclose(F.adjust_hue(before, hue).flatten().numpy(), hsv, atol=1e-3)
    # An angle in the hexagon of HSV differs from that on a circle by at most 1.2 degrees, so both give the same hue.
    assert abs((angle(after.flatten().numpy()) - angle(hsv) + 180) % 360 - 180) < 2.5
    hue_after = colorsys.rgb_to_hsv(*after.flatten().tolist())[0]
    assert abs((hue_after - h - hue + 0.5) % 1 - 0.5) < 2.5 / 360


def test_grey_pixels_keep_their_value_under_hue_and_saturation():
    gray = torch.full((3, 2, 2), 0.4)
    torch.testing.assert_close(apply(plan_of((1, 1, 1.7, 0.3)), gray), gray, atol=1e-4, rtol=0)


def test_each_view_of_each_image_has_different_matrices():
    recipe = ViewsConfig(num_views=2, color_probability=1.0, gray_probability=0.0)
    a, _ = color_matrices(draw_plan(recipe, 6), recipe)
    assert a.shape == (6, 2, 3, 3)
    assert a.dtype == np.float32
    assert len(np.unique(a.reshape(12, 9), axis=0)) == 12


def test_contrast_may_keep_the_mean_of_each_channel():
    """TensorFlow changes the contrast of each channel by itself: (x - mean) * factor + mean."""
    pixels = patch() + torch.tensor([0.2, 0.0, -0.2])[:, None, None]
    plan = plan_of((1.0, 0.6, 1.0, 0.0))
    mean = pixels.mean((1, 2), keepdim=True)
    torch.testing.assert_close(apply(plan, pixels, "channel"), (pixels - mean) * 0.6 + mean)
    assert not torch.allclose(apply(plan, pixels), (pixels - mean) * 0.6 + mean, atol=0.01)
    # Each operation sees the mean after those before it.
    brighter = plan_of((1.5, 0.6, 1.0, 0.0))
    torch.testing.assert_close(apply(brighter, pixels, "channel"), 1.5 * ((pixels - mean) * 0.6 + mean))
