"""wmse tune checks a choice before it times it, takes only what is faster, and writes settings that a run can load."""

import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trainer.cli import main
from trainer.config.loading import load_config, load_settings
from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.run.machine import tuned_for
from trainer.tools.dry_run import setting_warnings
from trainer.tune import cli, measure, run
from trainer.tune.choices import Choice, all_choices
from trainer.tune.measure import PARTS, Outcome, Part, compare, exact
from trainer.tune.run import Tuning, tune

CPU = torch.device("cpu")
THREADS = Choice({"data.threads": "2"}, "toy")
FIXED = [torch.tensor([1.0, 2.0])]


def toy_part(
    seconds: Callable[[Config], float], values: Callable[[Config], list[torch.Tensor]] = lambda _: FIXED
) -> Part:
    """Return a part whose calls take the given time."""
    return Part(lambda config, _: values(config), lambda config, _: lambda calls: calls * seconds(config))


@pytest.fixture
def make(tiny_config: Path, tiny_set: Path) -> Callable[..., Config]:
    def make(settings: dict[str, str]) -> Config:
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        return load_config(tiny_config, ["--data.root", str(tiny_set), "--data.threads", "1", *words])

    return make


def outcome_of(monkeypatch: pytest.MonkeyPatch, part: Part, make: Callable[..., Config]) -> tuple[Outcome, Tuning]:
    monkeypatch.setitem(PARTS, "toy", part)
    monkeypatch.setattr(run, "all_choices", lambda *_: [THREADS])
    tuning = Tuning()
    list(tune(make, CPU, 0.2, tuning, in_process=True))
    return tuning.tried[0][1], tuning


def with_two_threads(fast: float, slow: float = 1e-3) -> Callable[[Config], float]:
    return lambda config: fast if config.data.threads == 2 else slow


def test_a_faster_choice_is_taken_and_a_slower_one_is_not(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Config]
) -> None:
    faster, tuning = outcome_of(monkeypatch, toy_part(with_two_threads(5e-4)), make)
    assert (faster.taken, faster.ratio) == (True, pytest.approx(2.0))
    assert tuning.settings == {"data.threads": "2"}
    slower, tuning = outcome_of(monkeypatch, toy_part(with_two_threads(2e-3)), make)
    assert (slower.taken, slower.why) == (False, "not faster")
    assert tuning.settings == {}


def test_a_choice_within_the_noise_is_not_taken(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Config]) -> None:
    numbers = iter(range(10**9))
    noisy = lambda config: with_two_threads(8e-4)(config) * (1 + next(numbers) % 5)  # noqa: E731
    outcome, _ = outcome_of(monkeypatch, toy_part(noisy), make)
    assert not outcome.taken


@pytest.mark.parametrize("wrong", [1.1, math.nan])
def test_a_choice_with_another_result_is_refused_before_it_is_timed(
    wrong: float, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Config]
) -> None:
    def values(config: Config) -> list[torch.Tensor]:
        return [FIXED[0] * (wrong if config.data.threads == 2 else 1.0)]

    outcome, _ = outcome_of(monkeypatch, toy_part(with_two_threads(1e-6), values), make)
    assert not outcome.taken
    assert not outcome.milliseconds
    assert outcome.why.startswith("refused: a result is")


def test_a_choice_may_be_as_far_from_float32_as_the_settings_so_far() -> None:
    part = toy_part(lambda _: 1.0)
    wanted, before, near, far = (torch.full((4,), value) for value in (1.0, 1.02, 1.05, 1.2))
    assert not measure._check(part, [wanted], [before], [near])[1]
    assert (
        "0.2 away from float32, those of the settings so far 0.02" in measure._check(part, [wanted], [before], [far])[1]
    )
    pixels = Part(part.values, part.window, levels=True)
    assert not measure._check(pixels, [wanted], [wanted], [wanted + 1])[1]
    assert "2 levels apart" in measure._check(pixels, [wanted], [wanted], [wanted + 2])[1]


@pytest.mark.parametrize("error", [RuntimeError("no\nroom"), torch.OutOfMemoryError("full")])
def test_a_choice_that_fails_is_named_and_the_next_ones_are_tried(
    error: Exception, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Config]
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setitem(PARTS, "failing", Part(fail, fail))
    monkeypatch.setitem(PARTS, "toy", toy_part(with_two_threads(5e-4)))
    monkeypatch.setattr(run, "all_choices", lambda *_: [Choice({"data.prefetch_batches": "5"}, "failing"), THREADS])
    tuning = Tuning()
    list(tune(make, CPU, 0.2, tuning, in_process=True))
    (_, failed), (_, taken) = tuning.tried
    assert failed.why == f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    assert taken.taken


def test_settings_that_run_out_of_memory_give_way(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Config]) -> None:
    def seconds(config: Config) -> float:
        if config.data.threads == 1:
            raise torch.OutOfMemoryError("full")
        return 1e-3

    outcome, _ = outcome_of(monkeypatch, toy_part(seconds), make)
    assert (outcome.taken, outcome.why) == (True, "the settings so far run out of memory")


def end_the_process(*_: Any) -> Outcome:
    os._exit(3)


def take_too_long(*_: Any) -> Outcome:
    time.sleep(60)
    raise AssertionError("was not ended")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comparison", "minutes", "why"),
    [(end_the_process, 2.0, "it ended its process"), (take_too_long, 0.05, "took too long to check")],
)
def test_a_choice_that_ends_or_holds_its_process_loses_only_itself(
    comparison: Any, minutes: float, why: str, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Config]
) -> None:
    monkeypatch.setattr(run, "compare", comparison)
    monkeypatch.setattr(run, "all_choices", lambda *_: [THREADS, Choice({}, "toy", "is refused")])
    began = time.monotonic()
    tuning = Tuning()
    list(tune(make, CPU, minutes, tuning))
    assert why in tuning.tried[0][1].why
    assert tuning.tried[1][1].why == "is refused"
    assert time.monotonic() - began < 30


def test_the_time_is_a_limit(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Config]) -> None:
    slow = toy_part(lambda _: time.sleep(0.05) or 1e-3)
    monkeypatch.setitem(PARTS, "toy", slow)
    monkeypatch.setattr(run, "all_choices", lambda *_: [THREADS] * 20)
    tuning = Tuning()
    list(tune(make, CPU, 1e-5, tuning, in_process=True))
    assert [outcome.why for _, outcome in tuning.tried] == ["no time was left: give more --minutes"] * 20


def test_the_reference_is_float32_by_torch(make: Callable[..., Config]) -> None:
    config = make(
        {
            "precision": "bf16",
            "compile": "true",
            "model.batch_norm_backend": "triton",
            "optimizer.backend": "triton",
            "optimizer.name": "lars",
        }
    )
    reference = exact(config)
    assert (reference.precision, reference.compile) == ("fp32", "false")
    assert {reference.model.batch_norm_backend, reference.optimizer.backend, reference.wmse.backend} == {"torch"}


def test_choices_that_this_device_lacks_give_the_reason(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused = {choice.name: choice.refused for choice in all_choices(make({}), CPU, 5.0)}
    assert "needs an NVIDIA GPU" in refused["wmse.backend triton"]
    assert "needs an NVIDIA GPU" in refused["cuda_graphs true"]
    assert refused["data.threads 4"] == ""
    alone = {choice.name: choice.refused for choice in all_choices(make({"data.root": ""}), CPU, 1.0)}
    assert alone["data.threads 4"] == "needs images: give --data.root"
    assert "give --minutes 3" in alone["compile true"]


def test_a_step_that_does_not_fit_the_memory_is_not_tried(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.tune.choices.memory_gib", lambda _: (0.0, 0.001))
    refused = {choice.name: choice.refused for choice in all_choices(make({}), CPU, 5.0)}
    assert "a step needs about 0 of 0 GiB of memory: give a smaller" in refused["compile true"]
    assert refused["data.threads 4"] == ""


def test_a_faster_loader_is_not_taken_if_the_step_is_slower_anyway(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Config]
) -> None:
    monkeypatch.setitem(PARTS, "step", toy_part(lambda _: 0.01))
    monkeypatch.setitem(PARTS, "loader", toy_part(with_two_threads(5e-4)))
    step, loader = Choice({"compile": "true"}, "step"), Choice({"data.threads": "2"}, "loader")
    for choices, taken in (([step, loader], False), ([loader], True)):
        monkeypatch.setattr(run, "all_choices", lambda *_, choices=choices: choices)
        tuning = Tuning()
        list(tune(make, CPU, 0.2, tuning, in_process=True))
        outcome = tuning.tried[-1][1]
        assert outcome.taken == taken
    assert tuning.settings == {"data.threads": "2"}


@pytest.mark.slow
def test_real_parts_compare_equal_settings_as_equal(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong gradient of the whitening, of the update and of BatchNorm is refused."""
    config = make({"precision": "fp32"})
    for part in ("loss", "optimizer", "step", "loader"):
        outcome = compare(part, config, config, CPU, 0.01)
        assert outcome.milliseconds, (part, outcome.why)
    other = make({"precision": "fp32", "data.prefetch_batches": "4"})
    whole = PARTS["step"].values

    def wrong(config: Config, device: torch.device) -> list[torch.Tensor]:
        values = whole(config, device)
        if config.data.prefetch_batches == 4:
            values[1] = values[1] * 1.5  # one weight of many
        return values

    monkeypatch.setitem(PARTS, "step", Part(wrong, PARTS["step"].window))
    assert compare("step", config, other, CPU, 0.01).why.startswith("refused")


@pytest.mark.slow
def test_the_command_writes_settings_that_a_run_loads(
    tiny_config: Path,
    tiny_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PARTS, "toy", toy_part(with_two_threads(5e-4)))
    monkeypatch.setattr(run, "all_choices", lambda *_: [THREADS, Choice({"compile": "true"}, "toy", "is slow")])
    out = tmp_path / "tuned.yaml"
    monkeypatch.setattr(run, "tune", partial(tune, in_process=True))
    argv = ["tune", "--config", str(tiny_config), "--out", str(out), "--minutes", "0.01", "--data.root", str(tiny_set)]
    assert main([*argv, "--data.threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "data.threads 2" in printed
    assert "is slow" in printed
    assert yaml.safe_load(out.read_text()) == {"tuned_for": tuned_for(CPU), "data": {"threads": 2}}
    assert "# data.threads 2: toy 1 -> 0.5 ms" in out.read_text()
    loaded = load_settings([tiny_config, out], [])
    assert loaded.config.data.threads == 2
    assert str(out) in loaded.sources["data.threads"]
    assert not [line for line in setting_warnings(loaded.config, 1, CPU) if "wmse tune" in line]
    elsewhere = load_config([tiny_config, out], ["--tuned_for", "another GPU"])
    assert any("measured on another GPU" in line for line in setting_warnings(elsewhere, 1, CPU))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "--minutes is 0"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "7"], "cannot be divided evenly among 7 ranks"),
        (["--out", "missing/tuned.yaml"], "its folder does not exist"),
        (["--out", "/dev/null"], "wmse tune did not write"),
        (["--data.root", "missing"], "missing"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(
    words: list[str], message: str, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned.yaml"
    assert main(["tune", "--config", str(tiny_config), "--out", str(out), *words]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_file_of_the_user_is_not_overwritten(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tiny_config.read_text()
    assert main(["tune", "--config", str(tiny_config), "--out", str(tiny_config)]) == 2
    assert "wmse tune did not write" in capsys.readouterr().err
    assert tiny_config.read_text() == before


def test_nothing_timed_is_a_failure(
    tiny_config: Path,
    tiny_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "all_choices", lambda *_: [Choice({"data.threads": "2"}, "toy", "is refused")])
    argv = ["tune", "--config", str(tiny_config), "--out", str(tmp_path / "tuned.yaml"), "--data.root", str(tiny_set)]
    assert main(argv) == 1
    assert "nothing was timed" in capsys.readouterr().err


def test_an_interruption_keeps_the_choices_so_far(
    tiny_config: Path, tiny_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(make: Any, device: Any, minutes: float, tuning: Tuning) -> Any:
        tuning.settings["data.threads"] = "2"
        yield THREADS
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "tune", interrupted)
    out = tmp_path / "tuned.yaml"
    assert main(["tune", "--config", str(tiny_config), "--data.root", str(tiny_set), "--out", str(out)]) == 1
    assert yaml.safe_load(out.read_text())["data"] == {"threads": 2}


def test_a_share_holds_at_least_the_images_of_a_slice(make: Callable[..., Config]) -> None:
    config = make({})
    assert cli._images_of_a_rank(config, 1) == config.data.images_per_step
    assert cli._images_of_a_rank(config, 2) >= config.wmse.slice_size
    with pytest.raises(InputError):
        cli._images_of_a_rank(config, 3)
