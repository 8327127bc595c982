"""data.decoder: torchcodec shows the same pixels as DALI's decoder, and gives each image the same verdict."""

import builtins
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import encoded, image, make_folder
from PIL import Image
from test_decode_cache import EPOCH
from test_loader import CPU, PER_STEP, RECIPE, keep, picture_files, planner, same

from trainer.config.schema import DataConfig
from trainer.data import decoding
from trainer.data.decode_cache import DecodeCache
from trainer.data.index import Index, open_index
from trainer.data.loader import ViewLoader, train_requests
from trainer.errors import InputError

pytest.importorskip("torchcodec", reason="data.decoder: torchcodec needs the package torchcodec")


def jpeg(picture: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()


def turned() -> bytes:
    """Return a JPEG whose EXIF data asks to turn it by a quarter, which training ignores."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(image(seed=60, height=20, width=36), exif=exif)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Return an index of 20 images of several kinds; only decoding shows that one of them is damaged."""
    files = picture_files()
    names = sorted(files)
    files[names[1]] = encoded("WEBP", image(seed=50, height=18, width=44))
    files[names[2]] = jpeg(image("L", seed=51, height=25, width=20))
    files[names[3]] = files[names[3]][:-200] + bytes(198) + b"\xff\xd9"
    files[names[4]] = turned()
    files[names[5]] = jpeg(image(seed=52, height=30, width=31), progressive=True, subsampling=2)
    return open_index(make_folder(tmp_path_factory.mktemp("set"), files), "train")


def loader(index: Index, decoder: str, cache: DecodeCache | None = None) -> ViewLoader:
    data = DataConfig(threads=2, max_skipped_share=1.0, decoder=decoder)
    place = {"batch_size": PER_STEP, "device": CPU, "first_step": 0, "end_step": 2 * EPOCH, "cache": cache}
    return ViewLoader(index, replace(RECIPE, order="color_first"), data, train_requests(planner(index)), **place)


def test_the_views_are_those_of_dali(index: Index, tmp_path: Path) -> None:
    by_dali, by_torchcodec = loader(index, "dali"), loader(index, "torchcodec")
    expected = keep(by_dali)
    assert same(keep(by_torchcodec), expected)
    assert by_torchcodec.skipped.ids == by_dali.skipped.ids
    cached = loader(index, "torchcodec", DecodeCache(index, tmp_path / "memory", create=True))
    assert same(keep(cached), expected)


def test_torchcodec_decodes_the_usual_jpeg(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other decoders get what it would turn or cannot read."""
    by_others: list[bytes] = []
    monkeypatch.setattr(decoding, "decode", lambda data: by_others.append(data) or np.zeros((1, 1, 3), np.uint8))
    usual = jpeg(image(seed=1, height=12, width=16))
    assert decoding.decode_by_torchcodec(usual).shape == (12, 16, 3)
    others = [turned(), encoded("PNG", image(seed=2, height=8, width=9)), usual[:200]]
    for data in others:
        decoding.decode_by_torchcodec(data)
    assert by_others == others


def test_a_missing_package_is_named_before_the_first_step(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("torchcodec"):
            raise ModuleNotFoundError("No module named 'torchcodec'")
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        InputError, match=r"data.decoder is torchcodec.*pip install torchcodec.*set data.decoder to dali"
    ):
        loader(index, "torchcodec")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_is_decoded_on_a_gpu(index: Index) -> None:
    """The hardware decoder enlarges chroma without a filter, so that single pixels may differ."""
    usable = [i for i in range(len(index)) if i != 3]
    data = [np.frombuffer(index.read(i), np.uint8) for i in usable]
    decoded = decoding.decode_batch_on_gpu(data, torch.device("cuda", 0))
    for one, pixels in zip(data, decoded, strict=True):
        expected = decoding.decode(one.tobytes())
        assert tuple(pixels.shape) == expected.shape
        assert np.abs(pixels.cpu().numpy().astype(int) - expected).mean() < 3
