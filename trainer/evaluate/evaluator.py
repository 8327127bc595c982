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
from trainer.distributed.device import PRECISION_NAMES, choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.evaluate.features import (
    Encode,
    Features,
    Place,
    Split,
    encoding_dtype,
    extract,
    raw_pixels,
    trained_encoder,
    untrained_encoder,
)
from trainer.evaluate.knn import check_neighbours, knn_top1
from trainer.evaluate.linear import linear_probe, standardise
from trainer.evaluate.results import Results, Source
from trainer.evaluate.splits import classes_with_images, open_splits, unusable_files
from trainer.models.networks import EncoderNetwork, build_encoder_network
from trainer.run.checkpoint import choose_checkpoint, load_checkpoint, put_encoder
from trainer.run.commit import git_commit

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
        self.results = Results(run_dir, config_of_run, self.config, out)
        device = choose_device(self.config, ranks)
        self.place = Place(self.config, ranks, device)

    @cached_property
    def splits(self) -> tuple[Split, Split]:
        """The split that the probe and k-NN learn from, and the split that they are tested on."""
        return open_splits(self.place)

    def check(self, measures: Sequence[str]) -> None:
        """Open the splits. Every rank calls this. Raises InputError if the splits do not allow these measures."""
        train, _ = self.splits
        if "knn" in measures:
            check_neighbours(self.config.evaluate.knn_k, len(train.labelled))

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
        put_encoder(self._model, content["model"], path)
        _log.info("loaded the encoder of step %d from %s", content["step"], path)
        return trained_encoder(self._model)

    def measure(self, encode: Encode, source: Source, measures: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (measure, result) one by one on rank 0, nothing on other ranks. Every rank calls this."""
        self.check(measures)
        train_split, test_split = self.splits
        # Every rank encodes a share of the images. The measures themselves run on rank 0 alone.
        began = time.perf_counter()
        train = extract(encode, train_split, self.place)
        test = extract(encode, test_split, self.place)
        seconds = time.perf_counter() - began
        if not self.place.ranks.is_first:
            return
        _log.info(
            "encoded %d training and %d test images into %d features in %.1f s",
            len(train.x),
            len(test.x),
            train.x.shape[1],
            seconds,
        )
        for measure in measures:
            figures = _MEASURES[measure](train, test, self.place)
            yield measure, figures | self._about(measure, source, train, test)

    def _about(self, measure: str, source: Source, train: Features, test: Features) -> dict[str, Any]:
        """Return the part of a result that says what was measured and how."""
        train_split, test_split = self.splits
        learnt = classes_with_images(train_split)
        tested = classes_with_images(test_split)
        # Both splits number the classes alike, see `splits.in_classes_of`.
        names = test_split.class_names
        return {
            **self.results.about(measure, source),
            "train_fingerprint": train_split.index.fingerprint,
            "test_fingerprint": test_split.index.fingerprint,
            "features": train.x.shape[1],
            "train_images": len(train.x),
            "test_images": len(test.x),
            "skipped": train.skipped + test.skipped,
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


def _check_same_encoder(trained: dict[str, Any], config: Config, path: Path) -> None:
    """Raise InputError if a setting that the encoder depends on differs from its training."""
    # Two scalings of the pixels have the same weights, so comparing tensors would not show the difference.
    now = plain_settings(config)
    for key in ("views.mean", "views.std", "model.backbone", "model.stem"):
        if trained[key] != now[key]:
            raise InputError(
                f"{key} is {now[key]}, but {path} was trained with {trained[key]}: set {key} to {trained[key]}"
            )


def _linear(train: Features, test: Features, place: Place) -> dict[str, Any]:
    """Measure the linear probe on raw and on standardised features."""
    config = place.config.evaluate
    seed = place.config.seed
    raw = linear_probe(train, test, config, place.device, seed)
    # The second classifier shows how much of a low figure is due to badly scaled features.
    scaled_train, scaled_test = standardise(train, test)
    title = "linear probe, standardised"
    standardised = linear_probe(scaled_train, scaled_test, config, place.device, seed, title)
    rates = f"learning rate {config.probe_rate_start:g} to {config.probe_rate_end:g}"
    return {
        "top1": round(raw.top1, 4),
        "top5": round(raw.top5, 4),
        "standardised_top1": round(standardised.top1, 4),
        "standardised_top5": round(standardised.top5, 4),
        "protocol": f"Adam, {config.probe_epochs} epochs, batch size {config.probe_batch_size}, {rates}, "
        f"weight decay {config.probe_weight_decay:g}, no augmentation, last epoch",
    }


def _knn(train: Features, test: Features, place: Place) -> dict[str, Any]:
    """Measure k-NN."""
    k = place.config.evaluate.knn_k
    # Images that could not be read are skipped, so fewer may remain than the split holds.
    check_neighbours(k, len(train.x))
    top1 = knn_top1(train, test, k, place.device)
    return {
        "top1": round(top1, 4),
        "k": k,
        "metric": "Euclidean, unscaled features",
        "vote": "majority, ties to the smallest label",
    }


_MEASURES = {"linear": _linear, "knn": _knn}
