"""Checkpoints are complete, written atomically, loaded safely, and found by step."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from trainer.errors import InputError
from trainer.run.checkpoint import (
    FORMAT,
    choose_checkpoint,
    content_digest,
    load_checkpoint,
    load_encoder,
    load_newest,
    plain_names,
    save_checkpoint,
)
from trainer.run.checkpoint_files import checkpoint_path, list_checkpoints


def save(folder: Path, step: int, keep_last: int = 3, kept_steps: Container[int] = ()) -> Path:
    content = {"step": step, "model": {"w": torch.full((3,), float(step))}}
    return save_checkpoint(folder, content, keep_last, kept_steps)


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(folder)]


def test_the_newest_checkpoints_by_step_are_kept(tmp_path: Path) -> None:
    for step in (100_000_001, 1, 99_999_999, 100_000_001):  # numbers decide, not times or the alphabet
        save(tmp_path, step, keep_last=2)
    assert steps_in(tmp_path) == [99_999_999, 100_000_001]


def test_the_new_checkpoint_is_kept_although_later_ones_exist(tmp_path: Path) -> None:
    """A run continues from step 200 because 300 and 400 are broken: its next checkpoint is the best one."""
    for step in (100, 200, 300, 400, 250):
        save(tmp_path, step, keep_last=2)
    assert steps_in(tmp_path) == [250, 300, 400]


def test_checkpoints_of_kept_steps_are_not_deleted(tmp_path: Path) -> None:
    for step in (30, 100, 130, 200, 230, 250):
        save(tmp_path, step, keep_last=2, kept_steps={100, 200})
    assert steps_in(tmp_path) == [100, 200, 230, 250]
    save(tmp_path, 260, keep_last=1)
    assert steps_in(tmp_path) == [260]


def test_old_checkpoints_are_deleted_after_the_new_one_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    real, there = os.replace, []

    def replace(*names: str) -> None:
        there.append(steps_in(tmp_path))
        real(*names)

    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, 2, keep_last=1)
    assert (there, steps_in(tmp_path)) == ([[1]], [2])


def test_a_failed_deletion_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    save(tmp_path, 2, keep_last=1)
    assert steps_in(tmp_path) == [1, 2]
    assert "cannot delete the old file" in caplog.text
    assert "step_00000001.pt" in caplog.text


def test_a_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoint_path(tmp_path, 2).mkdir()
    assert steps_in(tmp_path) == [1]


def test_a_saved_checkpoint_loads_with_weights_only(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert torch.load(path, weights_only=True)["step"] == 7
    assert load_checkpoint(path)["model"]["w"].tolist() == [7.0] * 3


def test_a_failed_save_keeps_old_checkpoints_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"]


def test_the_temporary_file_of_a_killed_save_is_deleted(tmp_path: Path) -> None:
    """A process killed while it writes leaves its temporary file; some of them would fill the disk."""
    code = (
        "import os, pathlib, signal, sys; from trainer.files import atomic_write\n"
        "with atomic_write(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "step_00000001.pt")], cwd=ROOT, check=False)
    assert [p.name[:5] for p in tmp_path.iterdir()] == [".step"]
    save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002.pt"]


@contextmanager
def files_up_to(limit: int) -> Iterator[None]:
    """Let the system refuse files of more than `limit` bytes, as a full disk or a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 100, 1_000_000, 4_000_000, 8_000_100])
def test_a_full_disk_raises_an_oserror_and_keeps_old_checkpoints(limit: int, tmp_path: Path) -> None:
    """torch's writer alone raises a RuntimeError about positions.

    The limits are before the file, in its head, in the first tensor, between two, and in the zip directory at the end.
    """
    save(tmp_path, 1)
    content = {"step": 2, "model": {name: torch.zeros(1_000_000) for name in "ab"}}
    with files_up_to(limit), pytest.raises(OSError, match="too large") as caught:
        save_checkpoint(tmp_path, content, 1)
    assert caught.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"]


def test_the_first_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the later error that the temporary file in the missing folder cannot be deleted."""

    def lost(*_: object) -> None:
        shutil.rmtree(tmp_path / "checkpoints")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", lost)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path / "checkpoints", 1)


def test_a_missing_run_folder_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "unmounted" / "checkpoints", 1)


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_broken_newest_checkpoint_is_skipped_and_named(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "text": b"<html>"}[damage])
    content = load_newest(tmp_path)
    assert content is not None
    assert content["step"] == 1
    assert "step_00000002.pt" in caplog.text


def test_only_broken_checkpoints_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1).write_bytes(b"")
    with pytest.raises(InputError, match="Move them away"):
        load_newest(tmp_path)
    assert load_newest(tmp_path / "nothing") is None


def test_content_that_a_safe_load_refuses_is_not_saved(tmp_path: Path) -> None:
    for value in (Path("x"), np.float64(1.0), {1}, b"x"):
        with pytest.raises(TypeError, match=rf"not a {type(value).__name__} as config\.deep\.1"):
            save_checkpoint(tmp_path, {"step": 1, "model": {}, "config": {"deep": [0, value]}}, 1)
    assert not list(tmp_path.iterdir())


def test_the_file_of_another_program_is_refused(tmp_path: Path) -> None:
    for content in ({"model": {}}, {"format": 1, "model": {}}, {"format": FORMAT}, {"format": FORMAT, "model": 1}, [1]):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(InputError, match="is not a checkpoint of this program"):
            load_checkpoint(tmp_path / "other.pt")


def rich_content() -> dict[str, Any]:
    """Return a checkpoint with every kind of value; the tensors differ in content, type and layout."""
    floats = torch.arange(24, dtype=torch.float32)
    return {
        "step": 1,
        "model": {
            "channels_last": floats.view(2, 3, 2, 2).to(memory_format=torch.channels_last),
            "bfloat16": floats.bfloat16(),
            "slice": floats.view(4, 6)[:, 1:3],
            "expanded": torch.ones(2, 1).expand(2, 3),
            "scalar": torch.tensor(1.5, dtype=torch.float64),
            "count": torch.tensor(7),
            "bool": torch.tensor([True, False]),
            "empty": torch.zeros(0, 3),
        },
        "optimizer": {"state": {0: {"m": floats + 100}, 1: {}}, "groups": [{"betas": (0.9, 0.999), "lr": None}]},
        "config": {"name": "\u00fc", "flag": True, "nan": float("nan")},
    }


def test_every_kind_of_content_is_loaded_and_checked(tmp_path: Path) -> None:
    content = rich_content()
    back = load_checkpoint(save_checkpoint(tmp_path, content, 1))
    assert back["sha256"] == content_digest(content | {"format": FORMAT})
    for name, tensor in content["model"].items():
        assert torch.equal(back["model"][name], tensor), name
        assert back["model"][name].dtype == tensor.dtype
    assert back["model"]["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert back["optimizer"]["groups"] == content["optimizer"]["groups"]


def test_the_digest_depends_on_every_value_but_not_on_order() -> None:
    """Each change alters one thing: a bit, a dtype of the same bytes, a shape, a key, a value, or its type."""

    def changed(change: Callable[[dict[str, Any]], object]) -> str:
        content = rich_content()
        change(content)
        return content_digest(content)

    def turn_bit(content: dict[str, Any]) -> None:
        content["model"]["bfloat16"].view(torch.uint8)[-1] ^= 1

    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda c: None,
        turn_bit,
        lambda c: c["model"]["channels_last"][1, 2, 0, 1].add_(1),
        lambda c: c["model"].update(bfloat16=c["model"]["bfloat16"].view(torch.int16)),
        lambda c: c["model"].update(count=c["model"]["count"].view(1)),
        lambda c: c["model"].update(empty=torch.zeros(3, 0)),
        lambda c: c["model"].update(other=c["model"].pop("scalar")),
        lambda c: c["optimizer"]["state"].update({1: c["optimizer"]["state"].pop(0)}),
        lambda c: c["optimizer"]["groups"][0].update(betas=(0.9, 0.9990000000000001)),
        lambda c: c["optimizer"]["groups"].append({}),
        lambda c: c["config"].update(flag=1),
        lambda c: c["config"].update(flag="True"),
    ]
    digests = [changed(change) for change in changes]
    assert len(set(digests)) == len(changes)
    assert changed(lambda c: c["model"].update(count=c["model"].pop("count"))) == digests[0]
    assert changed(lambda c: c.update(sha256="?")) == digests[0]


def test_any_flipped_byte_of_a_tensor_is_detected(tmp_path: Path) -> None:
    """torch's reader does not detect it, because it ignores the checksums of the zip file."""
    tensor = torch.randn(40, generator=torch.Generator().manual_seed(0))
    path = save_checkpoint(tmp_path, {"step": 1, "model": {"w": tensor}}, 1)
    whole = path.read_bytes()
    first = whole.index(tensor.numpy().tobytes())
    for place in range(first, first + 160, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert torch.load(path, weights_only=True)["step"] == 1
        with pytest.raises(InputError, match=r"its content is not what was saved \(sha256"):
            load_checkpoint(path)
    path.write_bytes(whole)
    load_checkpoint(path)


def test_flipped_bytes_anywhere_are_detected_or_harmless(tmp_path: Path) -> None:
    """In the pickle and the tables of the zip file a safe load fails in a dozen ways. All must raise an InputError."""
    content = rich_content()
    path = save_checkpoint(tmp_path, content, 1)
    whole, digest = path.read_bytes(), load_checkpoint(path)["sha256"]
    refused = 0
    for place in range(0, len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert content_digest(load_checkpoint(path)) == digest, place
        except InputError:
            refused += 1
    assert refused > 100


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, rich_content(), 1)
    whole = path.read_bytes()
    for length in [0, 1, 3, 4, 100, *range(500, len(whole), 501), len(whole) - 22, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"cannot read checkpoint .* it is truncated, damaged or not a checkpoint"):
            load_checkpoint(path)


def test_prefixes_of_ddp_and_compile_are_removed() -> None:
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        assert plain_names({f"{prefix}encoder.w": 0}) == {"encoder.w": 0}
    assert plain_names({"encoder._orig_mod.w": 0}) == {"encoder.w": 0}


def test_prefixes_are_not_saved_but_can_be_loaded(tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    path = save_checkpoint(tmp_path, {"step": 1, "model": wrapped}, 1)
    assert list(torch.load(path, weights_only=True)["model"]) == ["weight", "bias"]
    content = {"format": FORMAT, "step": 2, "model": wrapped}
    torch.save(content | {"sha256": content_digest(content)}, checkpoint_path(tmp_path, 2))
    assert list(load_checkpoint(checkpoint_path(tmp_path, 2))["model"]) == ["weight", "bias"]


def test_a_checkpoint_is_chosen_by_step_or_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no checkpoint"):
        choose_checkpoint(tmp_path, "last")
    for step in (3, 12):
        save(tmp_path / "checkpoints", step)
    assert choose_checkpoint(tmp_path, "last").name == "step_00000012.pt"
    assert choose_checkpoint(tmp_path, "3").name == "step_00000003.pt"
    with pytest.raises(InputError, match=r"has no checkpoint of step 4; it has steps: 3, 12"):
        choose_checkpoint(tmp_path, "4")
    with pytest.raises(InputError, match=r"gone\.pt does not exist"):
        load_checkpoint(choose_checkpoint(tmp_path, str(tmp_path / "gone.pt")))


def test_an_encoder_of_other_sizes_is_refused(tmp_path: Path) -> None:
    given, same, other = (nn.ModuleDict({"encoder": nn.Linear(3, k), "projector": nn.Linear(k, 2)}) for k in (4, 4, 5))
    path = save_checkpoint(tmp_path, {"step": 1, "model": given.state_dict()}, 1)
    projector = same["projector"].weight.detach().clone()
    load_encoder(same, path)
    assert torch.equal(same["encoder"].weight, given["encoder"].weight)
    assert torch.equal(same["projector"].weight, projector)
    with pytest.raises(InputError, match=r"2 tensors differ, the first are encoder\.bias, encoder\.weight"):
        load_encoder(other, path)


def test_batch_counts_of_older_checkpoints_are_dropped(tmp_path: Path) -> None:
    model = {"encoder.bn.running_mean": torch.zeros(2), "encoder.bn.num_batches_tracked": torch.tensor(7)}
    path = save_checkpoint(tmp_path, {"step": 1, "model": model, "optimizer": {}}, keep_last=1)
    assert list(load_checkpoint(path)["model"]) == ["encoder.bn.running_mean"]
