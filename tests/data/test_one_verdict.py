"""Training, decode cache, evaluation and check-data agree on each image: whether it is usable, and on its pixels."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import damaged_png, encoded, image, make_folder, png_chunks

from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.dali_graph import eval_recipe
from trainer.data.decode_cache import DecodeCache
from trainer.data.decoding import decode, decode_by_dali
from trainer.data.image_probe import inspect_image
from trainer.data.index import Index, open_index
from trainer.data.loader import ViewLoader, eval_requests, train_requests
from trainer.data.plan import Planner
from trainer.data.verify import check_data
from trainer.distributed.ranks import ImageRange
from trainer.errors import InputError

RECIPE = ViewsConfig(num_views=2, size=16, eval_resize=16)
HEIGHT, WIDTH, PER_STEP, STEPS = 30, 40, 2, 50


def grey_png(bits: int, *extra: tuple[bytes, bytes]) -> bytes:
    rows = np.random.default_rng(0).integers(0, 2**bits, (HEIGHT, WIDTH)).astype(">u2" if bits == 16 else "u1")
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, bits, 0, 0, 0, 0)
    return png_chunks((b"IHDR", header), *extra, (b"IDAT", body), (b"IEND", b""))


def jpeg(**options: object) -> bytes:
    return encoded("JPEG", image(seed=3, height=HEIGHT, width=WIDTH), **options)


def stray_marker(kind: int, length: int = 2) -> bytes:
    data = jpeg()
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    return data[:middle] + bytes([0xFF, kind]) + length.to_bytes(2, "big") + bytes(length - 2) + data[middle:]


def many_scans(count: int) -> bytes:
    """Return a small progressive JPEG whose last scan is repeated `count` times; each scan covers all pixels."""
    data = jpeg(progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:-2] + data[start:-2] * count + data[-2:]


USABLE = {
    "png that DALI refuses": grey_png(8, (b"bKGD", b"")),
    "16-bit grey png with tRNS": grey_png(16, (b"tRNS", b"\0\7")),
    "a few more scans": many_scans(5),
}
UNUSABLE = {
    "no zlib stream": damaged_png(),
    "3,000 scans": many_scans(3_000),
    "too many pixels": encoded("PNG", image(height=200, width=300)),
}
EITHER = {f"stray marker {kind:02x}": stray_marker(kind, 9) for kind in (0xC4, 0xDA, 0xDD, 0xE1, 0xFE, 0xAE)}
LIMIT = 50_000  # pixels
DATA = DataConfig(threads=2, max_image_pixels=LIMIT, max_skipped_share=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image folder of all samples and some good images, 36 in all."""
    files = {f"train/c/{name}.jpg": data for name, data in (USABLE | UNUSABLE | EITHER).items()}
    good = {
        f"train/c/good {i}.jpg": encoded("JPEG", image(seed=i, height=HEIGHT, width=WIDTH))
        for i in range(36 - len(files))
    }
    return make_folder(tmp_path_factory.mktemp("set"), files | good)


def loader(index: Index, *, evaluates: bool = False, cache: DecodeCache | None = None) -> ViewLoader:
    planner = Planner(RECIPE, seed=0, num_images=len(index), images_per_step=PER_STEP, images=ImageRange(0, PER_STEP))
    recipe = eval_recipe(RECIPE) if evaluates else RECIPE
    everything = np.resize(np.arange(len(index)), PER_STEP * STEPS)
    requests = eval_requests(recipe, everything, PER_STEP) if evaluates else train_requests(planner)
    return ViewLoader(
        index,
        recipe,
        DATA,
        requests,
        batch_size=PER_STEP,
        device=torch.device("cpu"),
        first_step=0,
        end_step=STEPS,
        cache=cache,
    )


def run(batches: ViewLoader) -> tuple[list[torch.Tensor], set[str]]:
    """Return the views of all steps and the names of the skipped images."""
    views = [batch.views.clone() for batch in batches]
    return views, {Path(batches.index.name(i)).stem for i in batches.skipped.ids}


def test_all_readers_agree_on_every_image(folder: Path, tmp_path: Path) -> None:
    index = open_index(folder, "train")
    listed = {
        Path(line.split("\t")[0]).stem for line in (folder / ".wmse_index/train.skipped.txt").read_text().splitlines()
    }
    views, bad = run(loader(index))
    cached_views, cached_bad = run(loader(index, cache=DecodeCache(index, tmp_path / "cache", create=True)))
    _, evaluation_bad = run(loader(index, evaluates=True))
    assert bad == cached_bad == evaluation_bad
    assert all(torch.equal(a, b) for a, b in zip(views, cached_views, strict=True))
    assert {Path(name).stem for name, _ in check_data(folder, limits=DATA).bad} == bad | listed
    assert set(UNUSABLE) <= bad | listed
    assert not set(USABLE) & (bad | listed)


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_images_are_named_with_their_problem(folder: Path, name: str) -> None:
    problems = {Path(path).stem: problem for path, problem in check_data(folder, limits=DATA).bad}
    reasons = {"no zlib stream": "Error", "3,000 scans": "scans of 30x40 pixels, 16 times"}
    assert reasons.get(name, "has 200x300 pixels, more than data.max_image_pixels 50,000") in problems[name]


def test_an_image_that_only_pillow_decodes_is_usable() -> None:
    assert decode_by_dali(USABLE["png that DALI refuses"]) is None
    assert inspect_image(USABLE["png that DALI refuses"]).kind == "direct"
    assert decode(USABLE["png that DALI refuses"]).shape == (HEIGHT, WIDTH, 3)
    np.testing.assert_array_equal(decode(jpeg()), decode_by_dali(jpeg()))


@pytest.mark.parametrize("data", [jpeg(), jpeg(progressive=True), encoded("PNG"), encoded("JPEG", image("L"))])
def test_an_image_decoded_alone_has_the_pixels_of_the_graph(data: bytes) -> None:
    from nvidia.dali import fn, pipeline_def

    from trainer.data.dali_graph import Placement
    from trainer.data.dali_graph import decode as decode_in_graph

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph():
        encoded_image = fn.external_source(source=lambda: [np.frombuffer(data, np.uint8)], batch=True)
        return decode_in_graph(encoded_image, Placement(None, 1, 1))

    pipe = graph()
    pipe.build()
    np.testing.assert_array_equal(np.array(pipe.run()[0][0]), decode(data))


def test_an_image_with_too_many_pixels_is_refused_before_decoding() -> None:
    header = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 0, 0, 0, 0)
    bomb = png_chunks((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    with pytest.raises(InputError, match=r"13000x13000 pixels, more than data.max_image_pixels 100,000,000"):
        decode(bomb, DataConfig.max_image_pixels)
    webp = encoded("WEBP", image(height=300, width=300))
    assert inspect_image(webp, 89_999).problem == "has 300x300 pixels, more than data.max_image_pixels 89,999"
    assert inspect_image(webp, 90_000).kind == "convert"
