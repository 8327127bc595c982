"""Checkpoints are complete, never torn, read safely, and found by number."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from trainer.batch_norm import BatchNormStatistics
from trainer.checkpoint import (
    choose_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_encoder,
    load_newest,
    model_state,
    plain_names,
    save_checkpoint,
)
from trainer.errors import InputError


def save(folder: Path, step: int, keep_last: int = 3) -> Path:
    return save_checkpoint(folder, {"step": step, "model": {"w": torch.full((3,), float(step))}}, keep_last)


def test_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for step in (1, 99_999_999, 100_000_001, 50):  # the last is the lowest but one: numbers decide, not times
        save(tmp_path, step, keep_last=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [99_999_999, 100_000_001]


def test_loads_what_was_saved_with_weights_only(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert torch.load(path, weights_only=True)["step"] == 7
    assert load_checkpoint(path)["model"]["w"].tolist() == [7.0] * 3


def test_a_failed_save_leaves_the_old_ones_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"]


def test_what_a_killed_save_left_goes(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_broken_newest_is_passed_over_and_named(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "text": b"<html>"}[damage])
    content = load_newest(tmp_path)
    assert content is not None
    assert content["step"] == 1
    assert "step_00000002.pt" in caplog.text


def test_all_broken_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 1).write_bytes(b"")
    with pytest.raises(InputError, match="move them away"):
        load_newest(tmp_path)
    assert load_newest(tmp_path / "nothing") is None


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'pwned'}",)

    torch.save({"format": 1, "step": 1, "model": Evil()}, tmp_path / "step_00000001.pt")
    with pytest.raises(InputError, match="can't read checkpoint"):
        load_checkpoint(tmp_path / "step_00000001.pt")
    assert not (tmp_path / "pwned").exists()


def test_another_program_s_file_is_refused(tmp_path: Path) -> None:
    for content in ({"model": {}}, {"format": 0, "model": {}}, {"format": 1}, [1]):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(InputError, match="no checkpoint of this program"):
            load_checkpoint(tmp_path / "other.pt")


def test_saved_tensors_share_nothing() -> None:
    """BatchNorm's statistics are views of one tensor in a run; a file with such is refused by safetensors, for one."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    BatchNormStatistics(model)
    tensors = [*model_state(model).values(), *model.state_dict().values()]
    own = {value.untyped_storage().data_ptr() for value in tensors[: len(tensors) // 2]}
    assert len(own) == len(tensors) // 2
    assert own.isdisjoint(value.untyped_storage().data_ptr() for value in tensors[len(tensors) // 2 :])


def test_prefixes_of_ddp_and_compile_are_taken_off() -> None:
    names = ["module.encoder.w", "_orig_mod.encoder.w", "module._orig_mod.encoder.w", "encoder._orig_mod.w"]
    assert [next(iter(plain_names({name: 0}))) for name in names] == ["encoder.w"] * 4


def test_choosing_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint"):
        choose_checkpoint(tmp_path, "last")
    for step in (3, 12):
        save(tmp_path / "checkpoints", step)
    assert choose_checkpoint(tmp_path, "last").name == "step_00000012.pt"
    assert choose_checkpoint(tmp_path, "3").name == "step_00000003.pt"
    with pytest.raises(InputError, match=r"no checkpoint of step 4 .* there are: 3, 12"):
        choose_checkpoint(tmp_path, "4")
    with pytest.raises(InputError, match="no checkpoint"):
        load_checkpoint(choose_checkpoint(tmp_path, str(tmp_path / "gone.pt")))


def test_an_encoder_of_other_sizes_is_refused(tmp_path: Path) -> None:
    given, same, other = (nn.ModuleDict({"encoder": nn.Linear(3, k), "projector": nn.Linear(k, 2)}) for k in (4, 4, 5))
    path = save_checkpoint(tmp_path, {"step": 1, "model": model_state(given)}, 1)
    projector = same["projector"].weight.detach().clone()
    load_encoder(same, path)
    assert torch.equal(same["encoder"].weight, given["encoder"].weight)
    assert torch.equal(same["projector"].weight, projector)
    with pytest.raises(InputError, match=r"2 tensors differ, first encoder\.bias, encoder\.weight"):
        load_encoder(other, path)
