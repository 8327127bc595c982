"""wmse preview draws the views of the DALI graph beside their images."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.conftest import write_images
from trainer.config.loading import load_config
from trainer.errors import InputError
from trainer.tools.preview import write_preview

SIZE, CELL = 32, 100  # a view has 32 px, enlarged three times, and a gap of 2 px around
WHOLE = ("--views.crop_area", "[1, 1]", "--views.crop_ratio", "[1, 1]", "--views.flip_probability", "0",
         "--views.color_probability", "0", "--views.gray_probability", "0", "--views.num_views", "3",
         "--views.mean", "[0.4, 0.5, 0.6]", "--views.std", "[0.2, 0.3, 0.4]")  # fmt: skip


@pytest.fixture
def squares(tmp_path: Path) -> Path:
    """Return an image folder of 16 square images."""
    write_images(tmp_path / "set" / "train" / "cats", 16, seed=1, size=(SIZE, SIZE))
    return tmp_path / "set"


def cells(config_file: Path, data: Path, *more: str, step: int = 0) -> NDArray[np.float64]:
    """Return the cells of a preview at their original size, (4 images, 1 + views, S, S, 3)."""
    out = data.parent / "out" / "grid.png"
    write_preview(load_config(config_file, ["--data.root", str(data), *more]), 4, out, step)
    grid = np.asarray(Image.open(out), dtype=np.float64)
    rows = [np.split(row, grid.shape[1] // CELL, axis=1) for row in np.split(grid, 4)]
    return np.array(rows)[:, :, 2:-2:3, 2:-2:3]


def test_views_of_whole_images_equal_the_images_beside_them(tiny_config: Path, squares: Path) -> None:
    shown = cells(tiny_config, squares, *WHOLE)
    assert shown.shape == (4, 4, SIZE, SIZE, 3)
    assert np.abs(shown[:, 1:] - shown[:, :1]).mean(axis=(2, 3, 4)).max() < 2  # of 255
    assert np.abs(shown[0] - shown[1]).mean() > 20


def test_seed_and_step_decide_the_views(tiny_config: Path, squares: Path) -> None:
    first = cells(tiny_config, squares)
    assert np.array_equal(first, cells(tiny_config, squares))
    for other in (cells(tiny_config, squares, "--seed", "1"), cells(tiny_config, squares, step=1)):
        assert np.abs(first - other).mean() > 20


def test_a_set_smaller_than_a_step_can_be_previewed(tiny_config: Path, squares: Path) -> None:
    assert cells(tiny_config, squares, "--data.images_per_step", "1024").shape[0] == 4


def test_an_output_name_without_an_image_suffix_is_refused_first(tiny_config: Path, squares: Path) -> None:
    config = load_config(tiny_config, ["--data.root", str(squares)])
    with pytest.raises(InputError, match=r"--out is .*x.xyz: give a name with an image suffix"):
        write_preview(config, 4, squares / "new/x.xyz")
    assert not (squares / "new").exists()
