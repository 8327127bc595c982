"""Evaluator of a run, which loads one encoder after the other and measures it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.config.changes import plain_settings
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.data.printable import printable
from trainer.distributed.device import PRECISION_NAMES, choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.evaluate.diagnostics import DIAGNOSTICS
from trainer.evaluate.features import (
    Encode,
    Place,
    Split,
    encoding_dtype,
    raw_pixels,
    trained_encoder,
    untrained_encoder,
)
from trainer.evaluate.finetune import FINETUNE
from trainer.evaluate.knn import KNN, KNN_COSINE
from trainer.evaluate.linear import FEW_LABELS, LINEAR
from trainer.evaluate.linear_sgd import LINEAR_SGD
from trainer.evaluate.protocol import Protocol, Subject
from trainer.evaluate.results import Results, Source
from trainer.evaluate.splits import classes_with_images, open_splits, unusable_files
from trainer.models.networks import EncoderNetwork, build_encoder_network
from trainer.run.checkpoint import choose_checkpoint, load_checkpoint, put_encoder
from trainer.run.commit import git_commit

# The protocols by their names in `evaluate.protocols`; trainer.config.evaluation.PROTOCOLS lists the same names.
PROTOCOLS: dict[str, Protocol] = {
    "linear": LINEAR,
    "linear_sgd": LINEAR_SGD,
    "knn": KNN,
    "knn_cosine": KNN_COSINE,
    "few_labels": FEW_LABELS,
    "finetune": FINETUNE,
    "diagnostics": DIAGNOSTICS,
}
_log = logging.getLogger(__name__)


class Evaluator:
    """Measures encoders of one run. It builds the model and opens the splits once for all checkpoints."""

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
        # A result whose settings differ from those of the run gets another file name.
        self.config = load_config(config_path, settings)
        config_of_run = load_config(config_path, [])
        shaping = {name: protocol.settings for name, protocol in PROTOCOLS.items()}
        self.results = Results(run_dir, config_of_run, self.config, shaping, out)
        device = choose_device(self.config, ranks)
        self.place = Place(self.config, ranks, device)

    @cached_property
    def splits(self) -> tuple[Split, Split]:
        """The split that the protocols learn from, and the split that they are tested on."""
        return open_splits(self.place)

    def protocols(self, names: Sequence[str], which: str) -> list[str]:
        """Return the names of the protocols to run. names: from `evaluate.protocols`, or those of a command.

        which: as for `run_evaluation`. Raises InputError if a protocol is named that cannot measure it."""
        chosen = list(PROTOCOLS) if "all" in names else list(names)
        refused = [name for name in chosen if which == "pixels" and PROTOCOLS[name].trains_encoder]
        if refused and "all" not in names:
            raise InputError(f"{', '.join(refused)} trains the encoder, but raw pixels have none: remove it")
        return [name for name in chosen if name not in refused]

    def check(self, names: Sequence[str]) -> None:
        """Open the splits. Every rank calls this. Raises InputError if the splits do not allow these protocols."""
        for name in names:
            PROTOCOLS[name].check(self.config, *self.splits)

    @cached_property
    def _model(self) -> EncoderNetwork:
        # Built on the CPU, where the seed gives the same random weights as in training.
        return _plain_model(self.config).to(self.place.device)

    def encoder(self, which: str) -> tuple[Encode, Source]:
        """Return the function from pixels to features, and its source. which: as for `run_evaluation`."""
        if which == "pixels":
            return raw_pixels, Source(which)
        if which == "random":
            return untrained_encoder(self._model, self.place), Source(which)
        path = choose_checkpoint(self._run_dir, which)
        content = load_checkpoint(path)
        source = Source(str(content["step"]), path, content["sha256"])
        return self.trained_encoder(content, path), source

    def trained_encoder(self, content: dict[str, Any], path: Path) -> Encode:
        """Load the encoder of a checkpoint. The result is valid until the next encoder is loaded.

        Raises InputError if the checkpoint is of another model."""
        _check_same_encoder(content["config"], self.config, path)
        self._check_data(content, path)
        put_encoder(self._model, content["model"], path)
        _log.info("loaded the encoder of step %d from %s", content["step"], path)
        return trained_encoder(self._model)

    def _check_data(self, content: dict[str, Any], path: Path) -> None:
        """Compare the size of the images and the classes with those of the training.

        Raises InputError if they differ, or logs it if `evaluate.allow_differences` is set."""
        now = plain_settings(self.config)
        trained = content["config"]
        differences = [
            f"{key} is {now[key]}, but {path} was trained with {trained[key]}"
            for key in ("views.size", "views.eval_resize", "views.interpolation")
            if trained[key] != now[key]
        ]
        # A run on images without classes, and older checkpoints, have no names.
        names = content.get("class_names") or []
        own_names = self.splits[0].class_names
        if names and sorted(names) != sorted(own_names):
            differences.append(
                f"{path} was trained on other classes ({_some(names)}) than those of the evaluation ({_some(own_names)})"
            )
        if differences and not self.config.evaluate.allow_differences:
            raise InputError(
                f"{'; '.join(differences)}. Use the settings and the data set of the training, or set "
                "--evaluate.allow_differences true to measure something else on purpose"
            )
        for line in differences:
            _log.warning("%s", line)

    def measure(self, encode: Encode, source: Source, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (protocol, result) one by one on rank 0, nothing on other ranks. Every rank calls this."""
        self.check(names)
        subject = Subject(encode, self.place, *self.splits)
        # Protocols that run on rank 0 alone come last: other ranks would wait for them, and the wait has a limit.
        together = [name for name in names if PROTOCOLS[name].needs == "loader"]
        alone = [name for name in names if PROTOCOLS[name].needs == "features"]
        if alone:
            self._encode(subject)
        for name in [*together, *alone]:
            if name in alone and not self.place.ranks.is_first:
                return
            subject.state_path = self.results.state_path(name, source)
            subject.identity = self.results.identity(name, source, *self.splits)
            began = time.perf_counter()
            figures = PROTOCOLS[name].measure(subject)
            if self.place.ranks.is_first:
                about = self._about(name, source, subject)
                yield name, figures | about | {"seconds": round(time.perf_counter() - began, 1)}

    def _encode(self, subject: Subject) -> None:
        """Compute the features of both splits. Every rank encodes a share of the images."""
        began = time.perf_counter()
        train, test = subject.train, subject.test
        seconds = time.perf_counter() - began
        _log.info(
            "encoded %d training and %d test images into %d features in %.1f s",
            len(train.x),
            len(test.x),
            train.x.shape[1],
            seconds,
        )

    def _about(self, name: str, source: Source, subject: Subject) -> dict[str, Any]:
        """Return the part of a result that says what was measured and how."""
        train_split, test_split = self.splits
        test = subject.test
        # A protocol that reads images itself need not compute the features of the training split.
        train = subject.encoded_train
        learnt = classes_with_images(train_split)
        tested = classes_with_images(test_split)
        # Both splits number the classes alike, see `splits.in_classes_of`.
        names = test_split.class_names
        return {
            **self.results.about(name, source),
            "train_fingerprint": train_split.index.fingerprint,
            "test_fingerprint": test_split.index.fingerprint,
            "features": test.x.shape[1],
            "train_images": len(train.x) if train else len(train_split.labelled),
            "test_images": len(test.x),
            "skipped": test.skipped + (train.skipped if train else 0),
            "unusable_files": unusable_files(train_split) + unusable_files(test_split),
            "classes": len(learnt),
            "classes_without_test_images": [names[number] for number in learnt if number not in tested],
            "classes_without_training_images": [names[number] for number in tested if number not in learnt],
            "precision": PRECISION_NAMES[encoding_dtype(self.place)],
            "commit": git_commit(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def _plain_model(config: Config) -> EncoderNetwork:
    """Build the run's encoder with plain BatchNorm: an evaluation has one view, and ranks do not share statistics."""
    plain = replace(config.model, encoder_batch_norm="joint", batch_norm_ranks="local")
    plain_config = replace(config, model=plain)
    return build_encoder_network(plain_config)


def _some(names: Sequence[str]) -> str:
    """Name the first three of a list of classes."""
    shown = ", ".join(printable(name) for name in names[:3])
    return f"{len(names)} classes: {shown}, ..." if len(names) > 3 else shown


def _check_same_encoder(trained: dict[str, Any], config: Config, path: Path) -> None:
    """Raise InputError if a setting that the encoder depends on differs from its training."""
    # Two scalings of the pixels have the same weights, so comparing tensors would not show the difference.
    now = plain_settings(config)
    for key in ("views.mean", "views.std", "model.backbone", "model.stem"):
        if trained[key] != now[key]:
            raise InputError(
                f"{key} is {now[key]}, but {path} was trained with {trained[key]}: set {key} to {trained[key]}"
            )
