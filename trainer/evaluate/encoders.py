"""Sources of the encoders that are measured: the checkpoints of a run, or any other source of `load_encoder`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.config.changes import plain_settings
from trainer.config.loading import DEFAULT, load_config, load_settings
from trainer.config.schema import Config
from trainer.data.printable import printable
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.evaluate.evaluator import Evaluator, shaping_settings
from trainer.evaluate.features import Encode, raw_pixels, trained_encoder, untrained_encoder
from trainer.evaluate.results import Results, Source
from trainer.export import Encoder, Preprocess, load_encoder
from trainer.models.networks import EncoderNetwork, build_encoder_network
from trainer.run.checkpoint import choose_checkpoint, load_checkpoint, put_encoder

_log = logging.getLogger(__name__)


class RunEvaluator(Evaluator):
    """Evaluator of a run. It builds the model once for all checkpoints."""

    def __init__(self, run_dir: Path, settings: Sequence[str], ranks: Ranks, out: Path | None = None) -> None:
        """Load the run's config and choose the device.

        settings: command-line words that override the run's config.
        out: file for the results; None: files in RUN_DIR/eval.
        """
        config_path = run_dir / "config.yaml"
        if not config_path.exists():
            raise InputError(
                f"{run_dir} is not a run folder, since it has no config.yaml: give the --run_dir of a pre-training run"
            )
        self._run_dir = run_dir
        # The settings of the command line come after those of the run and replace them.
        config = load_config(config_path, settings)
        # A result whose settings differ from those of the run gets another file name.
        config_of_run = load_config(config_path, [])
        super().__init__(config, ranks, Results(run_dir, config_of_run, config, shaping_settings(), out))

    @cached_property
    def _model(self) -> EncoderNetwork:
        # Built on the CPU, where the seed gives the same random weights as in training.
        return _plain_model(self.config).to(self.place.device)

    def encoder(self, which: str) -> tuple[Encode, Source]:
        """Return the function from pixels to features, and its source. which: as for `run_evaluation`."""
        # These two need no checkpoint: they are the baselines.
        if which == "pixels":
            return raw_pixels, Source(which)
        if which == "random":
            return untrained_encoder(self._model, self.place), Source(which)
        path = choose_checkpoint(self._run_dir, which)
        content = load_checkpoint(path)
        source = Source(str(content["step"]), path, content["sha256"], content.get("cost"))
        return self.trained_encoder(content, path), source

    def trained_encoder(self, content: dict[str, Any], path: Path) -> Encode:
        """Load the encoder of a checkpoint. The result is valid until the next encoder is loaded.

        Raises InputError if the checkpoint is of another model."""
        trained = content["config"]
        _check_same_encoder(trained, self.config, path)
        now = plain_settings(self.config)
        # Images of another size or resize give valid features, but not those of the training.
        keys = ("views.size", "views.eval_resize", "views.interpolation")
        changed = [key for key in keys if trained[key] != now[key]]
        differences = [f"{key} is {now[key]}, but {path} was trained with {trained[key]}" for key in changed]
        # A run on images without classes, and older checkpoints, have no names.
        class_names = content.get("class_names") or []
        differences += _other_classes(self, class_names, str(path))
        _check_differences(self, differences)
        put_encoder(self._model, content["model"], path)
        _log.info("loaded the encoder of step %d from %s", content["step"], path)
        return trained_encoder(self._model)


def open_foreign(
    source: str, configs: Sequence[Path], settings: Sequence[str], ranks: Ranks, out: Path | None
) -> tuple[Evaluator, Encoder, Source]:
    """Load an encoder of any source of `load_encoder`, and build its evaluator with its own size and scaling of images.

    configs, settings: files and command-line words with the data set and the protocols. out: file for the results; None:
    they are only printed."""
    config, sources = load_settings(configs, settings, check_method=False)
    encoder = load_encoder(source)
    of_encoder: dict[str, Any] = {}
    for field in fields(Preprocess):
        key = f"views.{field.name}"
        wanted = getattr(config.views, field.name)
        own = getattr(encoder.preprocess, field.name)
        # A default may be replaced, but a setting that the user gave must not be ignored silently.
        if sources[key] != DEFAULT and wanted != own:
            raise InputError(
                f"{key} is {wanted}, but {source} needs {own}: remove {key}, since it follows from the encoder"
            )
        of_encoder[field.name] = own
    views = replace(config.views, **of_encoder)
    config = replace(config, views=views)
    results = Results(None, config, config, shaping_settings(), out)
    evaluator = Evaluator(config, ranks, results)
    encoder = encoder.to(evaluator.place.device)
    return evaluator, encoder, Source(encoder.name, sha256=encoder.sha256)


def check_classes(evaluator: Evaluator, class_names: Sequence[str], where: str) -> None:
    """Compare the classes of the evaluation with those of the training; opens the splits. where: names the encoder.

    Raises InputError if they differ, unless `evaluate.allow_differences` is set."""
    _check_differences(evaluator, _other_classes(evaluator, class_names, where))


def _check_differences(evaluator: Evaluator, differences: Sequence[str]) -> None:
    """Raise InputError that lists the differences from the training, or log them if `evaluate.allow_differences` is set."""
    if differences and not evaluator.config.evaluate.allow_differences:
        raise InputError(
            f"{'; '.join(differences)}. Use the settings and the data set of the training, or set "
            "--evaluate.allow_differences true to measure something else on purpose"
        )
    for line in differences:
        _log.warning("%s", line)


def _other_classes(evaluator: Evaluator, names: Sequence[str], where: str) -> list[str]:
    """Describe how the classes of the evaluation differ from those of the training; empty if they do not."""
    train_split, _ = evaluator.splits
    own = train_split.class_names
    # The order does not matter, because classes are compared by name.
    if not names or sorted(names) == sorted(own):
        return []
    return [f"{where} was trained on other classes ({_some(names)}) than those of the evaluation ({_some(own)})"]


def _some(names: Sequence[str]) -> str:
    """Name the first three of a list of classes."""
    shown = ", ".join(printable(name) for name in names[:3])
    if len(names) <= 3:
        return shown
    return f"{len(names)} classes: {shown}, ..."


def _plain_model(config: Config) -> EncoderNetwork:
    """Build the run's encoder with plain BatchNorm: an evaluation has one view, and ranks do not share statistics."""
    plain = replace(config.model, encoder_batch_norm="joint", batch_norm_ranks="local", batch_norm_backend="torch")
    plain_config = replace(config, model=plain)
    return build_encoder_network(plain_config)


def _check_same_encoder(trained: dict[str, Any], config: Config, path: Path) -> None:
    """Raise InputError if a setting that the encoder depends on differs from its training."""
    # Two scalings of the pixels have the same weights, so comparing tensors would not show the difference.
    now = plain_settings(config)
    for key in ("views.mean", "views.std", "model.backbone", "model.stem"):
        if trained[key] != now[key]:
            raise InputError(
                f"{key} is {now[key]}, but {path} was trained with {trained[key]}: set {key} to {trained[key]}"
            )
