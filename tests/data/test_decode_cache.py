"""The decode cache changes no pixel, reads each file once, and leaves nothing behind."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pictures import encoded, image, make_folder
from test_loader import CPU, PER_STEP, RECIPE, keep, picture_files, planner, same

from trainer.config.schema import DataConfig
from trainer.data.decode_cache import DecodeCache, check_cache_size, decoded_bytes
from trainer.data.image_probe import decode_rgb
from trainer.data.index import Index, open_index
from trainer.data.loader import ViewLoader, train_requests
from trainer.errors import InputError

EPOCH = 5  # steps


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Return an index of 20 images of several kinds and sizes; only decoding shows that one of them is damaged."""
    files = picture_files()
    names = sorted(files)
    files[names[1]] = encoded("WEBP", image(seed=50, height=18, width=44))
    files[names[2]] = encoded("PNG", image("L", seed=51, height=25, width=20))
    files[names[3]] = files[names[3]][:-200] + bytes(198) + b"\xff\xd9"
    return open_index(make_folder(tmp_path_factory.mktemp("set"), files), "train")


def loader(index: Index, cache: DecodeCache | None) -> ViewLoader:
    data = DataConfig(threads=2, max_skipped_share=1.0)
    requests = train_requests(planner(index))
    place = {"batch_size": PER_STEP, "device": CPU, "first_step": 0, "end_step": 2 * EPOCH, "cache": cache}
    return ViewLoader(index, replace(RECIPE, order="color_first"), data, requests, **place)


def test_the_cache_keeps_the_pixels_and_reads_each_file_once(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = keep(loader(index, None))
    reads: list[int] = []
    read = Index.read
    monkeypatch.setattr(Index, "read", lambda self, i: reads.append(i) or read(self, i))
    cache = DecodeCache(index, tmp_path / "memory", create=True)
    cached = keep(loader(index, cache))
    assert sorted(reads) == list(range(len(index)))
    assert same(cached, plain)


def test_the_ranks_of_a_node_share_the_cache_and_its_file_is_deleted(index: Index, tmp_path: Path) -> None:
    one = DecodeCache(index, tmp_path / "memory", create=True)
    other = DecodeCache(index, tmp_path / "memory", create=False)
    one.forget_name()
    other.forget_name()  # each rank does this; the second finds the file deleted
    assert not list(tmp_path.iterdir())
    assert other.get(4) is None
    pixels = np.asarray(decode_rgb(index.read(4)))
    one.put(4, pixels)
    found = other.get(4)
    assert found is not None
    assert np.array_equal(found, pixels)
    assert one.get(3) is None
    assert one.get(5) is None


def test_a_set_larger_than_the_cache_is_refused(index: Index) -> None:
    gib = decoded_bytes(index) / 2**30
    assert decoded_bytes(index) == sum(np.asarray(decode_rgb(index.read(i))).nbytes for i in range(len(index)))
    check_cache_size(index, gib)
    with pytest.raises(InputError, match=r"decode_cache_gib is .*, but the 20 images take 0\.0\d MiB decoded"):
        check_cache_size(index, gib * 0.999)


def test_missing_shared_memory_is_an_error_that_leaves_no_file(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"cannot get 0\.\d+ MiB of shared memory in .*No space left"):
        DecodeCache(index, tmp_path / "memory", create=True)
    assert not list(tmp_path.iterdir())


def test_a_leftover_file_is_replaced_and_a_link_is_refused(index: Index, tmp_path: Path) -> None:
    """A killed run may leave a file behind. A link could be another user's."""
    (tmp_path / "memory").write_bytes(b"\1" * 10**6)
    assert DecodeCache(index, tmp_path / "memory", create=True).get(0) is None
    (tmp_path / "link").symlink_to(tmp_path / "memory")
    with pytest.raises(InputError, match="symbolic links"):
        DecodeCache(index, tmp_path / "link", create=False)


def test_a_failure_of_dali_with_a_cache_skips_no_image(index: Index, tmp_path: Path) -> None:
    views = loader(index, DecodeCache(index, tmp_path / "memory", create=True))
    batches = iter(views)
    next(batches)

    def fail() -> None:
        raise RuntimeError("out of memory")

    views._pipe = SimpleNamespace(run=fail)
    known = set(views.skipped.ids)
    with pytest.raises(RuntimeError, match=r"DALI failed in step 1, though every image decodes: out of memory"):
        next(batches)
    assert set(views.skipped.ids) == known
