"""What a run says about its pace: steps alone change nothing, and each cause of a slow run is named."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_images
from tests.faults import Faults, start
from tests.integration.run_files import checkpoint
from trainer.cli import main
from trainer.data.decoding import decode
from trainer.run.checkpoint import content_digest
from trainer.run.digests import training_values
from trainer.run.pace import Pace

SHARES = ("reader", "checker", "decoder", "views", "checkpoint", "host", "slowest", "beside")


def pretrain(config: Path, data: Path, run_dir: Path, *more: str) -> int:
    """Run `wmse pretrain` in this process and return its exit code."""
    return main(["pretrain", "--config", str(config), "--data.root", str(data), "--run_dir", str(run_dir), *more])


def last_line(run_dir: Path) -> dict[str, Any]:
    """Return the last line of metrics.jsonl, with the name of its largest loss."""
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    lost = {cause: line[f"lost_{cause}"] or 0.0 for cause in SHARES}
    assert line["compute_share"] + sum(lost.values()) == pytest.approx(1)
    return {**line, "largest": max(lost, key=lambda cause: lost[cause])}


OPTIONS = {
    "wmse, fp16, micro-batches": ["--precision", "fp16", "--optimizer.accumulation_steps", "2", "--data.images_per_step", "32"],
    "wmse, online probe": ["--online_probe.enabled", "true"],
    "moco": ["--method", "moco", "--moco.queue_size", "48", "--moco.shuffle_images", "16", "--moco.batch_norm_rows", "8"],
    "byol": ["--method", "byol", "--optimizer.name", "lars"],
    "swav": ["--method", "swav", "--swav.freeze_prototypes_steps", "4"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_alone_change_nothing(
    name: str, tiny_set: Path, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The views grow after 6 steps. The first run stops after 5 and resumes; the second makes no steps alone."""
    early = "6" if "micro" in name else "2"
    epochs = "12" if "micro" in name else "4"
    options = [*OPTIONS[name], "--optimizer.epochs", epochs, "--views.early_size_epochs", f"[{early}]"]
    options += ["--views.size", "16", "--views.early_sizes", "[8]"]
    for more in (["--max_steps", "5"], []):
        assert pretrain(tiny_config, tiny_set, tmp_path / "run", *options, *more) == 0
    made = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in made if line["compute_share"] is not None] == [4, 5, 10, 11, 12]
    monkeypatch.setattr(Pace, "_measure", lambda *_: None)
    assert pretrain(tiny_config, tiny_set, tmp_path / "without", *options) == 0
    whole = [json.loads(line) for line in (tmp_path / "without" / "metrics.jsonl").read_text().splitlines()]
    assert [training_values(line) for line in made] == [training_values(line) for line in whole]
    ours, theirs = checkpoint(tmp_path / "run", 12), checkpoint(tmp_path / "without", 12)
    for part in ("model", "optimizer", "digests", "loss_scale", "metric_sums", "online_probe"):
        assert content_digest({part: ours[part]}) == content_digest({part: theirs[part]})


SLOW = {
    "read": (0.03, "reader"),
    "check": (0.03, "checker"),
    "save": (1.0, "checkpoint"),
    "host": (0.3, "host"),
}


@pytest.mark.parametrize("what", SLOW)
def test_what_slows_a_run_down_is_named(what: str, tiny_set: Path, tiny_config: Path, tmp_path: Path) -> None:
    seconds, cause = SLOW[what]
    arguments = ["pretrain", "--config", tiny_config, "--data.root", tiny_set, "--run_dir", tmp_path / "run"]
    options = ["--log.every_steps", "9", "--checkpoint.every_steps", "6"]
    process = start([*arguments, *options], tmp_path, Faults(slow=what, slow_seconds=seconds))[0]
    assert process.wait() == 0, process.output()[-3000:]
    line = last_line(tmp_path / "run")
    assert line["largest"] == cause
    assert line[f"lost_{cause}"] > 0.3
    assert f"({cause} " in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("cause", ["decoder", "views"])
def test_decoder_and_views_are_told_apart(cause: str, tiny_config: Path, tmp_path: Path) -> None:
    """Large images take long to decode, and many large views with blur take long to draw."""
    side = 1800 if cause == "decoder" else 60
    write_images(tmp_path / "images" / "train" / "a", 16, seed=1, size=(side, side))
    options = ["--log.every_steps", "9", "--optimizer.epochs", "9", "--data.test_split", "train"]
    if cause == "views":
        options += ["--views.blur_probability", "1", "--views.num_views", "6", "--views.interpolation", "bicubic"]
    assert pretrain(tiny_config, tmp_path / "images", tmp_path / "run", *options) == 0
    line = last_line(tmp_path / "run")
    other = "views" if cause == "decoder" else "decoder"
    assert line[f"lost_{cause}"] > 2 * line[f"lost_{other}"]


def test_images_that_readers_decode_for_the_cache_are_the_decoders(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(data: bytes) -> Any:
        time.sleep(0.03)
        return decode(data)

    monkeypatch.setattr("trainer.data.loader.decode", slow)
    write_images(tmp_path / "images" / "train" / "a", 160, seed=1)
    options = ["--optimizer.epochs", "1", "--log.every_steps", "10", "--data.decode_cache_gib", "0.1"]
    assert pretrain(tiny_config, tmp_path / "images", tmp_path / "run", *options, "--data.test_split", "train") == 0
    line = last_line(tmp_path / "run")
    assert line["largest"] == "decoder"
    assert line["lost_decoder"] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("what", "seconds", "cause"), [("forward", 0.4, "slowest"), ("read", 0.08, "reader")])
def test_a_slow_rank_is_named(
    what: str, seconds: float, cause: str, tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    arguments = ["pretrain", "--config", tiny_config, "--data.root", tiny_set, "--run_dir", tmp_path / "run"]
    faults = Faults(on_rank=1, slow=what, slow_seconds=seconds)
    options = ["--log.every_steps", "9", "--data.images_per_step", "32", "--optimizer.epochs", "9"]
    for process in start([*arguments, *options], tmp_path, faults, ranks=2):
        assert process.wait() == 0, process.output()[-3000:]
    line = last_line(tmp_path / "run")
    assert line["slowest_rank"] == 1
    assert line["largest"] == cause
    assert line[f"lost_{cause}"] > 0.4
    assert not math.isnan(line["compute_views_per_s"])
