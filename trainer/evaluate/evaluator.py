"""The evaluator of a run: takes its encoders one after the other, measures them, and writes DIR/eval/*.json."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.checkpoint import choose_checkpoint, load_checkpoint
from trainer.cluster.ranks import Ranks
from trainer.commit import git_commit
from trainer.config import Config
from trainer.config_load import load_config
from trainer.device import choose_device
from trainer.errors import InputError
from trainer.evaluate.features import (
    Encode,
    Features,
    Place,
    Split,
    extract,
    open_split,
    raw_pixels,
    trained_encoder,
    untrained_encoder,
)
from trainer.evaluate.knn import knn_top1
from trainer.evaluate.linear import linear_probe, standardise
from trainer.files import write_text
from trainer.model import Model, build_model

_log = logging.getLogger(__name__)


class Evaluator:
    """Measures encoders of one run. Model, indices and labels are made once, however many checkpoints are measured."""

    def __init__(self, run_dir: Path, settings: Sequence[str], ranks: Ranks) -> None:
        if not (run_dir / "config.yaml").exists():
            raise InputError(f"{run_dir} is no run folder: it has no config.yaml")
        self._run_dir = run_dir
        self.config = load_config(run_dir / "config.yaml", settings)
        self.place = Place(self.config, ranks, choose_device(self.config, ranks))

    @cached_property
    def splits(self) -> tuple[Split, Split]:
        """What the probe and k-NN learn from, and what they are tested on."""
        data = self.config.data
        train = open_split(data.probe_split or data.train_split, self.place)
        test = open_split(data.test_split, self.place)
        _check_classes(train.index.class_names, test.index.class_names)
        return train, test

    @cached_property
    def _model(self) -> Model:
        """Built on the CPU, where its random weights are those of the seed, as in training."""
        return _plain_model(self.config).to(self.place.device)

    def encoder(self, which: str) -> tuple[Encode, str]:
        """What turns pixels into features, and its name in the names of results. which: as for `run_evaluation`."""
        if which == "pixels":
            return raw_pixels, which
        if which == "random":
            return untrained_encoder(self._model, self.place), which
        path = choose_checkpoint(self._run_dir, which)
        content = load_checkpoint(path)
        return self.trained_encoder(content, path), str(content["step"])

    def trained_encoder(self, content: dict[str, Any], path: Path) -> Encode:
        """The encoder of a loaded checkpoint; valid until the next one is taken. Raises InputError for one of another model."""
        _check_scaling(content["config"], self.config, path)
        try:
            self._model.load_state_dict(content["model"])
        except RuntimeError as error:
            raise InputError(f"the model in {path} is not that of {self._run_dir / 'config.yaml'}: {error}") from error
        _log.info("encoder of step %d from %s", content["step"], path)
        return trained_encoder(self._model)

    def measure(self, encode: Encode, name: str, measures: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(measure, result) one by one; nothing on ranks but the first."""
        train_split, test_split = self.splits
        began = time.perf_counter()
        train = extract(encode, train_split, self.place)
        test = extract(encode, test_split, self.place)
        seconds = time.perf_counter() - began
        if not self.place.ranks.is_first:
            return
        _log.info("%d + %d images, %d features, %.1f s", len(train.x), len(test.x), train.x.shape[1], seconds)
        for measure in measures:
            yield measure, _MEASURES[measure](train, test, self.place) | _about(name, train, test)

    def result_path(self, measure: str, name: str) -> Path:
        """Path of a result."""
        return self._run_dir / "eval" / f"{measure}_{name}.json"

    def write(self, measure: str, name: str, result: dict[str, Any]) -> None:
        """Write one result."""
        path = self.result_path(measure, name)
        path.parent.mkdir(exist_ok=True)
        for rest in path.parent.glob(f".{path.name}.*"):  # of an evaluator that a signal ended while it wrote
            rest.unlink(missing_ok=True)
        write_text(path, json.dumps(result, indent=1) + "\n")


def _plain_model(config: Config) -> Model:
    """The run's model with plain BatchNorm: in evaluation there is one view and no other rank's rows."""
    plain = replace(config.model, encoder_batch_norm="joint", projector_batch_norm="joint", batch_norm_ranks="local")
    return build_model(replace(config, model=plain), Ranks())


def _check_scaling(trained: dict[str, Any], config: Config, path: Path) -> None:
    for key in ("mean", "std"):
        then, now = trained[f"views.{key}"], list(getattr(config.views, key))
        if then != now:
            raise InputError(f"views.{key} is {now}, but {path} was trained with {then}: evaluate with the same")


def _check_classes(train: list[str], test: list[str]) -> None:
    if train != test:
        missing = sorted(set(train) ^ set(test))
        raise InputError(f"the two splits don't have the same classes: {', '.join(missing[:10])} in one only")


def _linear(train: Features, test: Features, place: Place) -> dict[str, Any]:
    c, seed = place.config.evaluate, place.config.seed
    raw = linear_probe(train, test, c, place.device, seed)
    standardised = linear_probe(*standardise(train, test), c, place.device, seed)
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
    top1 = knn_top1(train, test, k, place.device)
    return {
        "top1": round(top1, 4),
        "k": k,
        "metric": "Euclidean, features as they are",
        "vote": "majority, ties to the smallest label",
    }


_MEASURES = {"linear": _linear, "knn": _knn}


def _about(name: str, train: Features, test: Features) -> dict[str, Any]:
    return {
        "checkpoint": name,
        "features": train.x.shape[1],
        "train_images": len(train.x),
        "test_images": len(test.x),
        "left_out": train.left_out + test.left_out,
        "commit": git_commit(),
    }
