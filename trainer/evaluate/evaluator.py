"""The evaluator of a run: loads its encoders one after the other and measures them."""

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
    """Measures encoders of one run. Model, indices and labels are made once, however many checkpoints are measured."""

    def __init__(self, run_dir: Path, settings: Sequence[str], ranks: Ranks, out: Path | None = None) -> None:
        """settings: command-line words over the run's config. out: a file that results go to, instead of RUN_DIR/eval."""
        own = run_dir / "config.yaml"
        if not own.exists():
            raise InputError(f"{run_dir} is no run folder: it has no config.yaml")
        self._run_dir = run_dir
        self.config = load_config(own, settings)
        self.results = Results(run_dir, load_config(own, []), self.config, out)
        self.place = Place(self.config, ranks, choose_device(self.config, ranks))

    @cached_property
    def splits(self) -> tuple[Split, Split]:
        """What the probe and k-NN learn from, and what they are tested on."""
        return open_splits(self.place)

    def check(self, measures: Sequence[str]) -> None:
        """Open the splits. Every rank calls this. Raises InputError if the measures can't be made on them."""
        train, _ = self.splits
        if "knn" in measures:
            check_neighbours(self.config.evaluate.knn_k, len(train.labelled))

    @cached_property
    def _model(self) -> EncoderNetwork:
        """Built on the CPU, where its random weights are those of the seed, as in training."""
        return _plain_model(self.config).to(self.place.device)

    def encoder(self, which: str) -> tuple[Encode, Source]:
        """Return what turns pixels into features, and its source. which: as for `run_evaluation`."""
        if which == "pixels":
            return raw_pixels, Source(which)
        if which == "random":
            return untrained_encoder(self._model, self.place), Source(which)
        path = choose_checkpoint(self._run_dir, which)
        content = load_encoder_content(path)
        return self.trained_encoder(content, path), Source(str(content["step"]), path, content["sha256"])

    def trained_encoder(self, content: dict[str, Any], path: Path) -> Encode:
        """Load the encoder of a checkpoint; it is valid until the next one is loaded. Raises InputError for one of another
        model."""
        _check_same_encoder(content["config"], self.config, path)
        put_encoder(self._model, content["model"], path)
        _log.info("encoder of step %d from %s", content["step"], path)
        return trained_encoder(self._model)

    def measure(self, encode: Encode, source: Source, measures: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (measure, result) one by one on the first rank, nothing on the others. Every rank calls this."""
        self.check(measures)
        train_split, test_split = self.splits
        began = time.perf_counter()
        train = extract(encode, train_split, self.place)
        test = extract(encode, test_split, self.place)
        seconds = time.perf_counter() - began
        if not self.place.ranks.is_first:
            return
        _log.info("%d + %d images, %d features, %.1f s", len(train.x), len(test.x), train.x.shape[1], seconds)
        for measure in measures:
            figures = _MEASURES[measure](train, test, self.place)
            yield measure, figures | self._about(measure, source, train, test)

    def _about(self, measure: str, source: Source, train: Features, test: Features) -> dict[str, Any]:
        train_split, test_split = self.splits
        learnt, tested = classes_with_images(train_split), classes_with_images(test_split)
        return {
            **self.results.about(measure, source),
            "train_fingerprint": train_split.index.fingerprint,
            "test_fingerprint": test_split.index.fingerprint,
            "features": train.x.shape[1],
            "train_images": len(train.x),
            "test_images": len(test.x),
            "left_out": train.left_out + test.left_out,
            "unusable_files": unusable_files(train_split) + unusable_files(test_split),
            "classes": len(learnt),
            "classes_without_test_images": [test_split.class_names[n] for n in learnt if n not in tested],
            "classes_without_training_images": [test_split.class_names[n] for n in tested if n not in learnt],
            "precision": PRECISION_NAMES[encoding_dtype(self.place)],
            "commit": git_commit(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def load_encoder_content(path: Path) -> dict[str, Any]:
    """Load a checkpoint whose encoder is to be measured. Raises InputError if it can't be read or has weights that are not
    finite."""
    content = load_checkpoint(path)
    weights = {name: value for name, value in content["model"].items() if name.startswith("encoder.")}
    wrong = [name for name, value in weights.items() if not value.isfinite().all()]
    if wrong:
        raise InputError(
            f"can't use checkpoint {path}: {len(wrong)} of the encoder's {len(weights)} tensors hold NaN or infinity (first: "
            f"{wrong[0]}); the training had failed by then, take an earlier one with --checkpoint STEP"
        )
    return content


def _plain_model(config: Config) -> EncoderNetwork:
    """Build the run's encoder with plain BatchNorm: an evaluation has one view and no rows of other ranks."""
    plain = replace(config.model, encoder_batch_norm="joint", batch_norm_ranks="local")
    return build_encoder_network(replace(config, model=plain))


def _check_same_encoder(trained: dict[str, Any], config: Config, path: Path) -> None:
    now = plain_settings(config)
    for key in ("views.mean", "views.std", "model.backbone", "model.stem"):
        if trained[key] != now[key]:
            raise InputError(f"{key} is {now[key]}, but {path} was trained with {trained[key]}: evaluate with the same")


def _linear(train: Features, test: Features, place: Place) -> dict[str, Any]:
    c, seed = place.config.evaluate, place.config.seed
    raw = linear_probe(train, test, c, place.device, seed)
    standardised = linear_probe(*standardise(train, test), c, place.device, seed, "linear probe, standardised")
    return {
        "top1": round(raw.top1, 4),
        "top5": round(raw.top5, 4),
        "standardised_top1": round(standardised.top1, 4),
        "standardised_top5": round(standardised.top5, 4),
        "protocol": f"Adam, {c.probe_epochs} epochs, batch {c.probe_batch_size}, rate {c.probe_rate_start:g} to "
        f"{c.probe_rate_end:g}, weight decay {c.probe_weight_decay:g}, no augmentation, last epoch",
    }


def _knn(train: Features, test: Features, place: Place) -> dict[str, Any]:
    k = place.config.evaluate.knn_k
    check_neighbours(k, len(train.x))  # again: images that could not be read are left out
    top1 = knn_top1(train, test, k, place.device)
    return {
        "top1": round(top1, 4),
        "k": k,
        "metric": "Euclidean, features as they are",
        "vote": "majority, ties to the smallest label",
    }


_MEASURES = {"linear": _linear, "knn": _knn}
