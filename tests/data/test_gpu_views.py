"""What only a GPU can show of the loader: whether its streams keep their order, and what its JPEG decoder refuses."""

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
    sides = np.random.default_rng(0).integers(200, 500, (48, 2)).tolist()
    files = {
        f"train/c/{i}.jpg": encoded("JPEG", image(seed=i, height=height, width=width))
        for i, (height, width) in enumerate(sides)
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


def taken(index: Index, before: Callable[[], None]) -> list[Tensor]:
    """The views of each step, copied by torch's stream; `before` is called before each batch is asked for."""
    views, source = [], batches(index)
    for _ in range(STEPS):
        before()
        views.append(next(source).views.clone())
    torch.cuda.synchronize()
    return views


@pytest.fixture(scope="module")
def calm(index: Index) -> list[Tensor]:
    """With nothing else on the device."""
    return taken(index, torch.cuda.synchronize)


def different(a: list[Tensor], b: list[Tensor]) -> list[int]:
    return [step for step, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)]


def test_the_views_of_two_runs_are_the_same(index: Index, calm: list[Tensor]) -> None:
    assert different(taken(index, torch.cuda.synchronize), calm) == []
    assert len(torch.unique(torch.stack([views[0].flatten() for views in calm]), dim=0)) == STEPS


def test_a_consumer_that_is_far_behind_gets_its_own_views(index: Index, calm: list[Tensor]) -> None:
    """Torch's stream stands still while DALI goes on, so each copy comes long after its batch was handed over."""

    def stand_still() -> None:
        torch.cuda._sleep(100_000_000)  # clocks, some 50 ms

    assert different(taken(index, stand_still), calm) == []


def test_views_are_the_same_beside_products_that_fill_the_device(index: Index, calm: list[Tensor]) -> None:
    """The JPEG engine does not wait for the SMs: it writes too early where memory changes hands by a stream's order alone."""
    other, factor = torch.cuda.Stream(), torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16)
    product, found_busy = torch.empty_like(factor), []
    other.wait_stream(torch.cuda.current_stream())

    def multiply() -> None:
        found_busy.append(not other.query())
        with torch.cuda.stream(other):
            for _ in range(40):  # of 1.1 TFLOP each
                torch.mm(factor, factor, out=product)

    assert different(taken(index, multiply), calm) == []
    assert sum(found_busy) > 0.8 * STEPS, "the products ended too early to be in the way"


# --- what nvJPEG refuses ---

PLAIN = encoded("JPEG", image(height=120, width=160))


def with_sampling(data: bytes, component: int, factors: int) -> bytes:
    """A JPEG whose frame claims other sampling factors for a component: 0x22 is twice as many samples across and down."""
    frame = data.index(b"\xff\xc0")
    position = frame + 11 + 3 * component
    return data[:position] + bytes([factors]) + data[position + 1 :]


def scribbled(seed: int) -> bytes:
    """Some bytes of the pixels' code are others."""
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
DAMAGED = {f"scribbled {seed}": scribbled(seed) for seed in range(12)} | {
    "samples that do not fit": with_sampling(PLAIN, 1, 0x12)
}


def test_what_nvjpeg_refuses_is_decoded_otherwise_or_replaced(tmp_path: Path) -> None:
    """None of it ends the run. Sound images keep Pillow's pixels but for rounding."""
    odd = {name: data for name, data in (SOUND | DAMAGED).items() if inspect_image(data).kind == "direct"}
    assert odd.keys() >= SOUND.keys()
    assert len(odd) >= 12, "the samples must get past the check of the structure"
    files = {f"train/c/{name}.jpg": data for name, data in odd.items()}
    files |= {f"train/c/z {i}.jpg": PLAIN for i in range(40 - len(files))}
    index = open_index(make_folder(tmp_path, files), "train")
    recipe = eval_recipe(ViewsConfig(num_views=1, size=32, eval_resize=32, interpolation="bilinear"))
    one = ViewLoader(
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
    for batch in one:
        shown += batch.image_ids.tolist()
        means += batch.views.float().mean((2, 3)).cpu().tolist()
    assert len(shown) == len(index)
    sound = [i for i in range(len(index)) if Path(index.name(i)).stem in SOUND]
    assert not set(sound) & one.skipped.ids
    for i in sound:
        assert shown[i] == i
        if Path(index.name(i)).stem != "one pixel":
            centre = np.asarray(decode_rgb(odd[Path(index.name(i)).stem]))[:, 20:140].mean((0, 1))
            np.testing.assert_allclose(means[i], centre, atol=3, err_msg=index.name(i))
