"""Fixtures and helpers that several tests share: a small image folder, a config that trains on it, a process group."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command does, before torch is loaded
# The operations are small: on a busy machine more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from PIL import Image

# A shell ignores SIGINT in programs that it starts in the background, and so would the runs of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():  # Triton kernels then run in its interpreter; must be set before they are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Hypothesis tries the same examples in every run, so that only a change of the code changes a test's outcome.
# --hypothesis-profile=explore tries new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore")
settings.load_profile("same")

ROOT = Path(__file__).parents[1]
TINY = """
model: {backbone: test_resnet, stem: half, zero_init_last: false, projector: mlp, projector_hidden: [16], embedding_size: 8}
wmse: {slice_size: 16}
views: {num_views: 2, size: 32, eval_resize: 32, interpolation: bilinear, blur_probability: 0}
data: {images_per_step: 16, threads: 1, read_ahead_steps: 1, test_split: val}
optimizer: {name: adam, learning_rate: 1e-3, learning_rate_rule: fixed, epochs: 3, warmup_steps: 2}
checkpoint: {every_minutes: 0}
log: {every_steps: 1, tensorboard: false}
evaluate: {images_per_batch: 16}
linear: {epochs: 5, batch_size: 16}
precision: fp32
device: cpu
"""


def write_images(folder: Path, count: int, seed: int, size: tuple[int, int] = (40, 36)) -> None:
    """Write `count` smooth random images as JPEG files to `folder`; create the folder if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 255, (5, 5, 3), dtype=np.uint8))
        small.resize(size, Image.Resampling.BICUBIC).save(folder / f"{seed}_{i}.JPEG", quality=90)


@pytest.fixture(autouse=True, scope="module")
def own_logging() -> Iterator[None]:
    """Restore the root logger after each module, because a run in this process sets up logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image folder of two classes, with 2 x 24 images in train and 2 x 8 in val."""
    root = tmp_path_factory.mktemp("tiny_set")
    for split, count in (("train", 24), ("val", 8)):
        for number, name in enumerate(("cats", "dogs")):
            write_images(root / split / name, count, seed=number + 10 * (split == "val"))
    return root


@pytest.fixture
def tiny_config(tmp_path: Path) -> Path:
    """Return the path of a config that trains on `tiny_set` in a second: 2 views of 32 px, 16 images a step, 3 epochs."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def group_of_one() -> Iterator[str]:
    """Create a process group of this process alone, so that code for several ranks runs without a second one.

    Return the name of the group.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()
