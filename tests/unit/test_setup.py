"""Construction of the parts of a run. tests/integration/test_run.py tests whole runs."""

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.data.index import open_index
from trainer.data.run_images import open_cache
from trainer.distributed.geometry import check_set_size, indivisible_images, micro_batches
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.models.compile import compile_networks
from trainer.setup import Run, build_loader, set_up


def run_of(tiny_set: Path, tiny_config: Path, *more: str) -> Run:
    """Return a run with the tiny config and more settings."""
    config = load_config(tiny_config, ["--data.root", str(tiny_set), *more])
    return set_up(config, Ranks(), torch.device("cpu"), tiny_config.parent)


def test_the_seed_decides_the_initial_weights(tiny_set: Path, tiny_config: Path) -> None:
    first, again, other = (
        run_of(tiny_set, tiny_config, "--seed", seed).step.method.networks.projector.last.weight
        for seed in ("1", "1", "2")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_settings_reach_their_parts(tiny_set: Path, tiny_config: Path) -> None:
    settings = ("--views.num_views", "3", "--precision", "bf16", "--wmse.eps", "0.1", "--max_steps", "100")
    run = run_of(tiny_set, tiny_config, *settings)
    assert (run.step.num_views, run.step.autocast_dtype) == (3, torch.bfloat16)
    assert run.planner.steps_per_epoch == 3
    assert run.end_step == run.schedule.total_steps == 9  # max_steps does not make a run longer


def test_a_local_batch_that_cannot_be_divided_into_micro_batches_is_refused(tiny_set: Path, tiny_config: Path) -> None:
    settings = ("--data.images_per_step", "48", "--optimizer.accumulation_steps", "3")
    assert run_of(tiny_set, tiny_config, *settings).step.micro_batches == 3
    config = load_config(tiny_config, settings)
    with pytest.raises(
        InputError, match=r"accumulation_steps is 3: the 32 images .*multiples of 16 images.*; use 1, 2$"
    ):
        micro_batches(config, 32)
    with pytest.raises(
        InputError, match=r"accumulation_steps is 3: .*multiples of 48 images, which wmse needs.*; possible values: 1$"
    ):
        load_config(tiny_config, [*settings, "--wmse.iterations", "2", "--wmse.permutation_block", "48"])


def test_permutation_blocks_are_indivisible_only_with_several_iterations(tiny_config: Path) -> None:
    settings = ["--wmse.permutation_block", "32", "--data.images_per_step", "32"]
    assert indivisible_images(load_config(tiny_config, settings)) == 16
    assert indivisible_images(load_config(tiny_config, [*settings, "--wmse.iterations", "2"])) == 32


def test_a_set_of_another_size_gives_a_warning(tiny_config: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(tiny_config, ["--data.expected_images", "50"])
    with caplog.at_level(logging.WARNING):
        check_set_size(config, 50)
        assert not caplog.records
        check_set_size(config, 16)  # enough for one step
    assert "expects 50 training images, this data set has 16" in caplog.text


@pytest.mark.parametrize(
    ("interpreted", "settings", "message"),
    [
        (
            "0",
            ["--wmse.backend", "triton"],
            "wmse.backend triton needs an NVIDIA GPU .*set wmse.backend to auto or torch",
        ),
        (
            "1",
            ["--wmse.backend", "triton", "--wmse.cholesky_float64", "true"],
            "wmse.backend triton whitens in float32 only",
        ),
        (
            "0",
            ["--optimizer.backend", "triton", "--optimizer.name", "lars"],
            "optimizer.backend triton needs an NVIDIA GPU .*set optimizer.backend to auto or torch",
        ),
        (
            "0",
            ["--data.augment_backend", "triton"],
            "data.augment_backend triton needs an NVIDIA GPU .*set data.augment_backend to dali",
        ),
        (
            "0",
            ["--model.batch_norm_backend", "triton"],
            "model.batch_norm_backend triton needs an NVIDIA GPU .*set it to torch",
        ),
        (
            "0",
            ["--model.batch_norm_backend", "triton_conv"],
            "model.batch_norm_backend triton_conv needs an NVIDIA GPU .*set it to torch",
        ),
    ],
)
def test_a_backend_that_cannot_run_is_refused_before_the_set_is_read(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, interpreted: str, settings: list[str], message: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    with pytest.raises(InputError, match=message):
        run_of(Path("no_such_set"), tiny_config, *settings)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_run_trains_on_views_of_the_augmentation_kernels(
    tiny_set: Path, tiny_config: Path, precision: str, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    losses = {}
    for backend in ("dali", "triton"):
        run = run_of(tiny_set, tiny_config, "--data.augment_backend", backend, "--precision", precision)
        batch = next(iter(build_loader(run, 0)))
        assert batch.views.dtype == (dtype if backend == "triton" else torch.uint8)
        losses[backend] = run.step(batch.views, 0, 0.1).loss
    # The tiny config has no blur, whose rounding differs. The interpreter cuts bf16 off instead of rounding it.
    tolerance = 1e-5 if precision == "fp32" else 0.1
    torch.testing.assert_close(losses["triton"], losses["dali"], rtol=tolerance, atol=0)


def test_a_cache_that_another_rank_fails_to_open_is_not_left_behind(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("another rank is gone")

    monkeypatch.setattr("trainer.data.run_images.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("torch.distributed.barrier", fail)
    config = load_config(tiny_config, ["--data.decode_cache_gib", "1"])
    index = open_index(tiny_set, "train")
    with pytest.raises(RuntimeError, match="another rank is gone"):
        open_cache(config, index, Ranks(0, 2))
    assert not list(tmp_path.glob("wmse_*"))
    monkeypatch.setattr("trainer.data.run_images.SHARED_MEMORY", tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"cannot get 0\.\d+ MiB of shared memory in .*nowhere \(No such file"):
        open_cache(config, index, Ranks())


def test_the_clean_up_of_read_only_shared_memory_does_not_hide_the_error(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    config, index = load_config(tiny_config, ["--data.decode_cache_gib", "1"]), open_index(tiny_set, "train")
    monkeypatch.setattr("trainer.data.run_images.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("os.unlink", refuse)
    monkeypatch.setattr("trainer.data.decode_cache.os.open", refuse)
    with pytest.raises(InputError, match=r"shared memory in .* \(Read-only file system\)"):
        open_cache(config, index, Ranks())


@pytest.mark.parametrize(
    ("settings", "on_gpu", "mode"),
    [
        ({}, True, None),
        ({"cuda_graphs": True}, True, "reduce-overhead"),
        ({"autotune": True}, True, "max-autotune-no-cudagraphs"),
        ({"autotune": True, "cuda_graphs": True}, True, "max-autotune"),
        ({"autotune": True, "cuda_graphs": True}, False, None),
    ],
)
def test_the_compiler_gets_the_mode_threads_and_memory_budget(
    settings: dict[str, bool], on_gpu: bool, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default Inductor would start up to 32 processes for each rank of a node."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: given.update(options))
    monkeypatch.setattr("trainer.models.compile.own_cores", lambda: 3)
    config = replace(Config(), model=replace(Config().model, activation_memory_budget=0.7), **settings)
    with torch._inductor.config.patch(compile_threads=1), torch._functorch.config.patch(activation_memory_budget=1.0):
        compile_networks(nn.Linear(1, 1), config, torch.device("cuda" if on_gpu else "cpu"))
        assert torch._inductor.config.compile_threads == 3
        assert torch._functorch.config.activation_memory_budget == 0.7
    assert given["mode"] == mode
    assert given["fullgraph"]
