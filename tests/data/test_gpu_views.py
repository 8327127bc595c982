"""The loader on a GPU: its streams keep their order, and images that nvJPEG refuses do not end the run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import encoded, image, make_folder
from torch import Tensor

from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.dali_graph import eval_recipe
from trainer.data.image_probe import decode_rgb, inspect_image
from trainer.data.index import Index, open_index
from trainer.data.loader import Batch, ViewLoader, eval_requests, train_requests
from trainer.data.plan import Planner
from trainer.distributed.ranks import ImageRange

pytest.importorskip("nvidia.dali")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
RECIPE = ViewsConfig(num_views=4, size=96)
PER_STEP, STEPS = 16, 60


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Return an index of 48 JPEG files of 200 to 500 px."""
    sizes = np.random.default_rng(0).integers(200, 500, (48, 2)).tolist()
    files = {
        f"train/c/{i}.jpg": encoded("JPEG", image(seed=i, height=height, width=width))
        for i, (height, width) in enumerate(sizes)
    }
    return open_index(make_folder(tmp_path_factory.mktemp("set"), files), "train")


def batches(index: Index) -> Iterator[Batch]:
    planner = Planner(RECIPE, seed=0, num_images=len(index), images_per_step=PER_STEP, images=ImageRange(0, PER_STEP))
    return iter(
        ViewLoader(
            index,
            RECIPE,
            DataConfig(),
            train_requests(planner),
            batch_size=PER_STEP,
            device=GPU,
            first_step=0,
            end_step=STEPS,
        )
    )


def take_views(index: Index, before: Callable[[], None]) -> list[Tensor]:
    """Return the views of each step, copied on torch's stream. Call `before` before each batch is requested."""
    views, source = [], batches(index)
    for _ in range(STEPS):
        before()
        views.append(next(source).views.clone())
    torch.cuda.synchronize()
    return views


@pytest.fixture(scope="module")
def views_of_an_idle_device(index: Index) -> list[Tensor]:
    """Return the views of a run that has the device to itself."""
    return take_views(index, torch.cuda.synchronize)


def differing_steps(a: list[Tensor], b: list[Tensor]) -> list[int]:
    return [step for step, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)]


def test_two_runs_give_the_same_views(index: Index, views_of_an_idle_device: list[Tensor]) -> None:
    assert differing_steps(take_views(index, torch.cuda.synchronize), views_of_an_idle_device) == []
    assert len(torch.unique(torch.stack([views[0].flatten() for views in views_of_an_idle_device]), dim=0)) == STEPS


def test_a_slow_consumer_gets_the_right_views(index: Index, views_of_an_idle_device: list[Tensor]) -> None:
    """Torch's stream waits while DALI continues, so that each copy happens long after its batch was returned."""

    def delay_stream() -> None:
        torch.cuda._sleep(100_000_000)  # clocks, some 50 ms

    assert differing_steps(take_views(index, delay_stream), views_of_an_idle_device) == []


def test_views_are_the_same_while_matrix_products_fill_the_device(
    index: Index, views_of_an_idle_device: list[Tensor]
) -> None:
    """The JPEG engine does not wait for the SMs, so it writes too early if only stream order protects the memory."""
    other, factor = torch.cuda.Stream(), torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16)
    product, found_busy = torch.empty_like(factor), []
    other.wait_stream(torch.cuda.current_stream())

    def multiply() -> None:
        found_busy.append(not other.query())
        with torch.cuda.stream(other):
            for _ in range(40):  # 1.1 TFLOP each
                torch.mm(factor, factor, out=product)

    assert differing_steps(take_views(index, multiply), views_of_an_idle_device) == []
    assert sum(found_busy) > 0.8 * STEPS, "the products ended too early to be in the way"


# --- images that nvJPEG refuses ---

PLAIN = encoded("JPEG", image(height=120, width=160))


def with_sampling(data: bytes, component: int, factors: int) -> bytes:
    """Replace a component's sampling factors in a JPEG's frame header. 0x22: twice as many samples across and down."""
    frame = data.index(b"\xff\xc0")
    position = frame + 11 + 3 * component
    return data[:position] + bytes([factors]) + data[position + 1 :]


def with_random_bytes(seed: int) -> bytes:
    """Return the plain JPEG with five random bytes in its compressed pixel data."""
    data, rng = bytearray(PLAIN), np.random.default_rng(seed)
    start = PLAIN.index(b"\xff\xda") + 20
    for position in rng.integers(start, len(data) - 10, 5).tolist():
        if 0xFF not in data[position - 1 : position + 2]:
            data[position] = int(rng.integers(1, 255))
    return bytes(data)


SOUND = {
    "grey of 2x2 samples": with_sampling(encoded("JPEG", image("L", 120, 160)), 0, 0x22),
    "progressive": encoded("JPEG", image(height=120, width=160), progressive=True),
    "restart after each row": encoded("JPEG", image(height=120, width=160), restart_marker_rows=1),
    "one pixel": encoded("JPEG", image(height=1, width=1)),
}
DAMAGED = {f"with_random_bytes {seed}": with_random_bytes(seed) for seed in range(12)} | {
    "samples that do not fit": with_sampling(PLAIN, 1, 0x12)
}


def test_images_that_nvjpeg_refuses_are_decoded_by_pillow_or_replaced(tmp_path: Path) -> None:
    """None of them ends the run. Sound images have Pillow's pixels up to rounding."""
    odd = {name: data for name, data in (SOUND | DAMAGED).items() if inspect_image(data).kind == "direct"}
    assert odd.keys() >= SOUND.keys()
    assert len(odd) >= 12, "the samples must get past the check of the structure"
    files = {f"train/c/{name}.jpg": data for name, data in odd.items()}
    files |= {f"train/c/z {i}.jpg": PLAIN for i in range(40 - len(files))}
    index = open_index(make_folder(tmp_path, files), "train")
    recipe = eval_recipe(ViewsConfig(num_views=1, size=32, eval_resize=32, interpolation="bilinear"))
    loader = ViewLoader(
        index,
        recipe,
        DataConfig(max_skipped_share=1.0),
        eval_requests(recipe, np.arange(len(index)), 8),
        batch_size=8,
        device=GPU,
        first_step=0,
        end_step=-(-len(index) // 8),
    )
    shown, means = [], []
    for batch in loader:
        shown += batch.image_ids.tolist()
        means += batch.views.float().mean((2, 3)).cpu().tolist()
    assert len(shown) == len(index)
    sound = [i for i in range(len(index)) if Path(index.name(i)).stem in SOUND]
    assert not set(sound) & loader.skipped.ids
    for i in sound:
        assert shown[i] == i
        if Path(index.name(i)).stem != "one pixel":
            centre = np.asarray(decode_rgb(odd[Path(index.name(i)).stem]))[:, 20:140].mean((0, 1))
            np.testing.assert_allclose(means[i], centre, atol=3, err_msg=index.name(i))
