"""Settings are strict, all problems are reported at once, and saved settings load unchanged."""

from pathlib import Path

import pytest

from trainer.config.loading import describe_sources, load_config, load_settings, save_config
from trainer.config.schema import Config, flatten
from trainer.errors import InputError
from trainer.schedule import peak_learning_rate


def load(text: str, tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def problems(text: str, tmp_path: Path, *overrides: str) -> str:
    """Return the message of the error that these settings raise."""
    with pytest.raises(InputError) as caught:
        load(text, tmp_path, *overrides)
    return str(caught.value)


def test_numbers_may_be_written_in_any_usual_form(tmp_path: Path) -> None:
    config = load(
        "optimizer: {learning_rate: 1e-3, weight_decay: 1E-6, warmup_epochs: 10}\nwmse: {eps: .5e-3}\n"
        "views: {crop_area: [2e-1, 1]}",
        tmp_path,
    )
    assert config.optimizer.learning_rate == 1e-3
    assert config.optimizer.weight_decay == 1e-6
    assert config.wmse.eps == 5e-4
    assert config.views.crop_area == (0.2, 1.0)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    config = load("seed: 1\nviews: {crop_area: [0.2, 1]}", tmp_path, "--seed", "5", "--views.crop_ratio=[0.5, 2]")
    assert config.seed == 5
    assert config.views.crop_area == (0.2, 1.0)
    assert config.views.crop_ratio == (0.5, 2.0)


def test_a_saved_config_loads_unchanged(tmp_path: Path) -> None:
    config = load("model: {projector_hidden: [8, 9]}\nrun_dir: 'a: b'", tmp_path, "--wmse.eps", "1e-4")
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []) == config


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    message = problems(
        "views: {early_sizes: [96, 128], early_size_epochs: [5]}\ncuda_graphs: true\ncompile: false\n"
        "data: {images_per_step: 1024}\noptimizer: {accumulation_steps: 8}",
        tmp_path,
    )
    assert "views.early_sizes is [96, 128] with early_size_epochs [5]: give one epoch for each size" in message
    assert "cuda_graphs is true with compile false: set compile to auto or true" in message
    assert (
        "accumulation_steps is 8: data.images_per_step 1024 cannot be divided into that many micro-batches of"
        in message
    )
    assert "multiples of 256 images, which wmse needs together; possible values: 1, 2, 4" in message
    assert "in increasing order" in problems("views: {early_sizes: [96, 96], early_size_epochs: [5, 5]}", tmp_path)
    assert "set each one below views.size 96" in problems(
        "views: {size: 96, early_sizes: [96], early_size_epochs: [5]}", tmp_path
    )
    many = f"views: {{early_sizes: {list(range(96, 104))}, early_size_epochs: {list(range(1, 9))}}}"
    assert "views.early_sizes has 8 sizes: give at most 7" in problems(many, tmp_path)
    assert "max_skipped_steps is 5 with precision fp16" in problems("precision: fp16\nmax_skipped_steps: 5", tmp_path)
    assert "optimizer.backend is triton with optimizer.name adam" in problems(
        "optimizer: {name: adam, backend: triton}", tmp_path
    )
    assert "data.augment_backend is triton with a blur of 27 taps" in problems(
        "data: {augment_backend: triton}\nviews: {blur_window: 27, blur_sigma: [0.1, 5]}", tmp_path
    )
    for name in ("adam", "sgd", "adamw", "larc"):
        assert f"optimizer.rate_in_momentum is false with optimizer.name {name}: only lars reads it" in problems(
            f"optimizer: {{name: {name}, rate_in_momentum: false}}", tmp_path
        )
    assert "optimizer.start_learning_rate is 0.3 without a warm-up" in problems(
        "optimizer: {start_learning_rate: 0.3}", tmp_path
    )
    assert "optimizer.final_learning_rate is 0.1 with optimizer.schedule drops" in problems(
        "optimizer: {final_learning_rate: 0.1, schedule: drops}", tmp_path
    )
    late = "views: {early_sizes: [96], early_size_epochs: [9]}\noptimizer: {epochs: 9}"
    assert "early_size_epochs is [9]: set the last one below optimizer.epochs 9" in problems(late, tmp_path)


def test_all_problems_are_reported_with_the_nearest_keys(tmp_path: Path) -> None:
    message = problems(
        "sed: 1\noptimizer: {epoch: 3, name: rmsprop}\ndata: 7\nviews: {size: abc}\nmodel:",
        tmp_path,
        "--loss.slise_size",
        "4",
        "stray",
    )
    for part in (
        "unknown setting sed: did you mean seed?",
        "model is an empty section: give settings below it, or remove the line",
        "unknown setting optimizer.epoch: did you mean optimizer.epochs?",
        "optimizer.name is 'rmsprop': give one of 'adam', 'lars', 'sgd', 'adamw', 'larc'",
        "data is a section",
        "views.size is 'abc': give a value of type int",
        "unknown setting loss.slise_size: did you mean wmse.slice_size?",
        "'stray' does not belong to a setting",
    ):
        assert part in message
    assert message.startswith("8 problem(s)")


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    assert "'seed' is given twice" in problems("seed: 1\nseed: 2", tmp_path)


def test_abbreviated_keys_are_refused(tmp_path: Path) -> None:
    assert "unknown setting optimizer.learning" in problems("seed: 0", tmp_path, "--optimizer.learning", "1")


@pytest.mark.parametrize("text", ["", "# nothing", "a: [", "[1, 2]", "\xff"])
def test_broken_yaml_gives_one_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(text.encode("latin1"))
    with pytest.raises(InputError, match="config"):
        load_config(tmp_path / "config.yaml", [])


def test_an_option_without_a_value_is_refused(tmp_path: Path) -> None:
    message = problems("seed: 0", tmp_path, "--seed", "--wmse.eps", "0.1", "--views.hue")
    assert "--seed has no value" in message
    assert "--views.hue has no value" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wmse: {slice_size: 128}", "wmse.slice_size is 128 with model.embedding_size 128"),
        ("data: {images_per_step: 1000}", "set it to 768 or 1024"),
        ("data: {images_per_step: 100}", "set it to 256"),
        ("wmse: {iterations: 2, permutation_block: 128}", "wmse.permutation_block is 128"),  # half a slice
        ("wmse: {iterations: 2, permutation_block: 768}", "wmse.permutation_block is 768"),  # 1024 images
        ("views: {num_views: 1}", "views.num_views is 1: it must be at least 2"),
        ("views: {hue: 0.6}", "views.hue is 0.6: it must be at most 0.5"),
        ("views: {crop_area: [0.5, 0.2]}", "the smaller one first"),
        ("views: {crop_area: [0.5, 2]}", "give at most 1"),
        ("views: {blur_window: 22}", "such as 23"),
        ("views: {eval_resize: 100}", "views.eval_resize is 100"),
        ("views: {std: [1, 1, 0]}", "above 0"),
        ("optimizer: {warmup_epochs: 1, warmup_steps: 5}", "set only one of them"),
        ("optimizer: {warmup_epochs: 100.5}", "set it to at most optimizer.epochs"),
        ("optimizer: {schedule: drops, epochs: 50}", "decreasing numbers between 0 and"),
        ("optimizer: {learning_rate: .nan}", "give a finite number"),
        ("optimizer: {learning_rate: .inf}", "give a finite number"),
        ("model: {projector_hidden: [0, 8]}", "at least 1"),
        ("seed: -1", "seed is -1"),
        ("seed:", "seed has no value"),
    ],
)
def test_impossible_settings_are_named(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in problems(text, tmp_path)


def test_the_square_root_rule_gives_the_peak_learning_rate() -> None:
    assert peak_learning_rate(Config()) == pytest.approx(3.2)  # 0.1 sqrt(1024)


def test_every_setting_has_a_docstring() -> None:
    """--help shows the docstring below each field."""
    from jsonargparse import ArgumentParser

    from trainer.config.loading import add_config_arguments

    parser = ArgumentParser()
    add_config_arguments(parser)
    helps = {action.dest: action.help for action in parser._actions}
    missing = [key for key in flatten(Config()) if not (helps[key] or "").strip(" .")]
    assert not missing


# --- a text has the same value in a file and on the command line ---

TEXTS = [
    ("max_steps", "010", 10),
    ("max_steps", "0x10", 16),
    ("run_dir", "20261128_01", "20261128_01"),
    ("run_dir", "1:30", "1:30"),
    ("data.train_split", "no", "no"),
    ("data.train_split", "1e3", "1e3"),
    ("checkpoint.every_minutes", "1e1", 10.0),
    ("checkpoint.every_minutes", "7", 7.0),
    ("allow_changes", "True", True),
    ("views.crop_area", "[02e-1, 1]", (0.2, 1.0)),
    ("max_steps", "1_000", None),
    ("max_steps", "1:30", None),
    ("max_steps", "1e3", None),
    ("allow_changes", "no", None),
    ("views.hue", "0_0.1", None),
    ("views.crop_area", "[0.1, 1_0]", None),
    ("views.crop_area", "[0.1, 1, 1]", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "text", "value"), TEXTS)
@pytest.mark.parametrize("place", ["file", "quoted in the file", "command line"])
def test_a_text_has_the_same_value_in_a_file_and_on_the_command_line(
    tmp_path: Path, place: str, key: str, text: str, value: object
) -> None:
    if place == "quoted in the file" and text.startswith("["):
        pytest.skip("a quoted list is a text")
    written = {"file": f"{key}: {text}", "quoted in the file": f"{key}: '{text}'", "command line": "device: cpu"}[place]
    overrides = [f"--{key}={text}"] if place == "command line" else []
    if value is None:
        source = "command line" if overrides else str(tmp_path / "config.yaml")
        assert f"{source}: {key} is '{text}': give " in problems(written, tmp_path, *overrides)
    else:
        found = flatten(load(written, tmp_path, *overrides))[key]
        assert (found, type(found)) == (value, type(value))


def test_no_environment_variable_changes_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    for name in ("SEED", "WMSE_SEED", "APP_SEED", "PYTEST_SEED", "__MAIN___SEED"):
        monkeypatch.setenv(name, "7")
    assert load("device: cpu", tmp_path).seed == 0


def test_a_key_given_as_a_section_and_dotted_is_refused(tmp_path: Path) -> None:
    assert "wmse.eps is given twice" in problems("wmse: {eps: 0.1}\nwmse.eps: 0.2", tmp_path)
    assert load("wmse: {eps: 0.1}\nwmse.iterations: 2", tmp_path).wmse.iterations == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [1]\nb: &b [*a, *a]\nseed: 1", "aliases are not allowed in settings"),
        ("seed: " + "[" * 3000, "more than 8 levels of brackets"),
        ("x: " * 3, "mapping values are not allowed here"),
        ("seed: " + "9" * 5000, "seed is '999"),
    ],
)
def test_yaml_that_expands_without_limit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in problems(text, tmp_path)


def test_deeply_nested_brackets_on_the_command_line_are_refused(tmp_path: Path) -> None:
    message = problems("device: cpu", tmp_path, "--views.crop_area=" + "[" * 3000)
    assert "views.crop_area is '[[[" in message
    assert len(message) < 300


# --- several files, and the source of a value ---


def test_later_files_override_earlier_ones_and_the_sources_are_recorded(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("seed: 1\nwmse: {eps: 0.1, iterations: 2}\ndata: {images_per_step: 2048}")
    second.write_text("wmse: {eps: 0.2}\nmax_steps: 5")
    config, sources = load_settings([first, second], ["--max_steps", "6"])
    assert (config.seed, config.wmse.eps, config.wmse.iterations, config.max_steps) == (1, 0.2, 2, 6)
    assert sources["seed"] == sources["wmse.iterations"] == str(first)
    assert sources["wmse.eps"] == str(second)
    assert (sources["max_steps"], sources["device"]) == ("command line", "default")
    assert (
        describe_sources(config, sources) == f"settings from {first}, then {second}; on the command line: max_steps=6"
    )
    save_config(config, tmp_path / "saved.yaml", sources)
    assert f"  eps: 0.2  # {second}" in (tmp_path / "saved.yaml").read_text().splitlines()
    assert load_config(tmp_path / "saved.yaml", []) == config


def test_problems_name_their_source(tmp_path: Path) -> None:
    message = problems("sed: 1\nwmse: {eps: x}", tmp_path, "--sede", "2", "--seed", "y")
    file = tmp_path / "config.yaml"
    for part in (
        f"{file}: unknown setting sed:",
        f"{file}: wmse.eps is 'x'",
        "line: unknown setting sede",
        "line: seed is 'y'",
    ):
        assert part in message


def test_a_recipe_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("imagenet_rn50_wmse4_100ep"), []).optimizer.epochs == 100
    with pytest.raises(InputError, match="did you mean imagenet_rn50_wmse4_100ep"):
        load_config(Path("imagenet_rn50_wmse4_100"), [])
    Path("imagenet_rn50_wmse4_100ep").write_text("seed: 3")
    assert load_config(Path("imagenet_rn50_wmse4_100ep"), []).seed == 3


def test_a_tilde_is_replaced_by_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load("run_dir: ~/runs/a\ndata: {root: ~/data}", tmp_path, "--init_from=~")
    assert (config.run_dir, config.data.root, config.init_from) == ("/home/me/runs/a", "/home/me/data", "/home/me")
    assert load("run_dir: a/~", tmp_path).run_dir == "a/~"
    assert "run_dir is '~nobody_here/x'" in problems("run_dir: ~nobody_here/x", tmp_path)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("batch_size", "data.images_per_step"),
        ("data.batch-size", "data.images_per_step"),
        ("weight_decay", "optimizer.weight_decay"),
        ("num_workers", "data.threads"),
        ("output_dir", "run_dir"),
        ("arch", "model.backbone"),
        ("run-dir", "run_dir"),
        ("slice_size", "wmse.slice_size"),
    ],
)
def test_common_names_of_other_programs_are_suggested_for(tmp_path: Path, name: str, meant: str) -> None:
    assert f"unknown setting {name}: did you mean {meant}?" in problems("device: cpu", tmp_path, f"--{name}", "1")


def test_a_run_folder_stands_for_its_settings(tmp_path: Path) -> None:
    save_config(Config(seed=7), tmp_path / "config.yaml")
    assert load_config(tmp_path, []).seed == 7


def test_a_list_needs_no_brackets_on_the_command_line() -> None:
    config = load_config(None, ["--views.crop_area", "0.4,1.0", "--model.projector_hidden", "64,32"])
    assert config.views.crop_area == (0.4, 1.0)
    assert config.model.projector_hidden == (64, 32)
