"""What is said of a run before it starts."""

from pathlib import Path

import pytest

from trainer.config_load import load_config
from trainer.describe import dry_run, estimate_memory, plan_lines
from trainer.errors import InputError
from trainer.model import Model


def test_numbers_of_the_plan(tiny_config: Path) -> None:
    """50 images, 16 a step on two ranks that whiten 16 rows together, 2 views, 3 iterations."""
    config = load_config(tiny_config, ["--loss.iterations", "3", "--loss.permutation_block", "16"])
    text = "\n".join(plan_lines(config, 50, 2))
    for part in (
        "images: 50 in (no data.root); 3 steps an epoch, 2 left out of each in turn",
        "steps: 9 = 3 epochs x 3; warm-up 2 steps, then half cosine to 0",
        "16 images x 2 views on 2 rank(s), 8 images = 16 views a rank",
        "6 slices of 16 x 8 a step, shared by groups of 2 neighbouring ranks",
    ):
        assert part in text
    assert "none shared" in "\n".join(plan_lines(config, 50, 1))


@pytest.mark.parametrize(("name", "copies"), [("adam", 4), ("lars", 3)])
def test_memory_of_the_state(name: str, copies: int, tiny_config: Path) -> None:
    """Weights, gradients and one or two moments, 4 bytes each; activations grow with the views' area."""
    config = load_config(tiny_config, ["--optimizer.name", name])
    weights = sum(p.numel() for p in Model(config.model, config.views).parameters())
    memory = estimate_memory(config, 10)
    assert memory.state == copies * 4 * weights
    assert memory.total == memory.state + 10 * memory.activations_per_view
    larger = load_config(tiny_config, ["--optimizer.name", name, "--views.side", "64", "--views.test_resize", "64"])
    growth = estimate_memory(larger, 10).activations_per_view / memory.activations_per_view
    assert 3.5 < growth < 4.1


def test_a_dry_run_needs_a_set_or_its_size(tiny_config: Path) -> None:
    with pytest.raises(InputError, match=r"data\.expected_images is 0"):
        dry_run(load_config(tiny_config, []), 1)
    with pytest.raises(InputError, match="has 15 images, one step takes"):
        dry_run(load_config(tiny_config, ["--data.expected_images", "15"]), 1)
