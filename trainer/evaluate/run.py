"""Measures the encoder of a run: a process of its own, which reads a checkpoint and writes DIR/eval/*.json."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint import choose_checkpoint, load_checkpoint
from trainer.cluster.ranks import Ranks, find_ranks
from trainer.config import Config
from trainer.config_load import load_config
from trainer.device import choose_device
from trainer.distributed import process_group
from trainer.errors import InputError
from trainer.evaluate.features import Encode, Features, Place, extract, raw_pixels, trained_encoder, untrained_encoder
from trainer.evaluate.knn import knn_top1
from trainer.evaluate.linear import linear_probe, standardise
from trainer.evaluate.report import print_table
from trainer.files import write_text
from trainer.machine import git_commit
from trainer.model import Model, build_model
from trainer.run_folder import start_logging

_log = logging.getLogger(__name__)


def run_evaluation(run_dir: Path, which: str, settings: Sequence[str], measures: Sequence[str]) -> dict[str, Any]:
    """Evaluate `which` ("last", a step, a file, "random": the untrained encoder, "pixels": no encoder) of a run.

    settings: command-line words over the run's config. measures: of "linear" and "knn". Returns {measure: result}, the same
    that is written to DIR/eval/MEASURE_STEP.json.
    """
    ranks = find_ranks()
    start_logging(None, ranks.rank)
    if not (run_dir / "config.yaml").exists():
        raise InputError(f"{run_dir} is no run folder: it has no config.yaml")
    config = load_config(run_dir / "config.yaml", settings)
    place = Place(config, ranks, choose_device(config, ranks))
    with process_group(ranks, place.device, config.timeout_minutes):
        encode, name = _encoder(run_dir, which, place)
        began = time.perf_counter()
        train = extract(encode, config.data.probe_split or config.data.train_split, place)
        test = extract(encode, config.data.test_split, place)
        seconds = time.perf_counter() - began
        _check_classes(train, test)
        if not ranks.is_first:
            return {}
        _log.info("%d + %d images, %d features, %.1f s", len(train.x), len(test.x), train.x.shape[1], seconds)
        results = {measure: _MEASURES[measure](train, test, place) | _about(name, train, test) for measure in measures}
    (run_dir / "eval").mkdir(exist_ok=True)
    for measure, result in results.items():
        write_text(run_dir / "eval" / f"{measure}_{name}.json", json.dumps(result, indent=1) + "\n")
    print_table(name, results)
    return results


def _encoder(run_dir: Path, which: str, place: Place) -> tuple[Encode, str]:
    """What turns pixels into features, and the name of it in file names."""
    if which == "pixels":
        return raw_pixels, which
    model = _plain_model(place.config)
    if which == "random":
        return untrained_encoder(model.to(place.device), place), which
    path = choose_checkpoint(run_dir, which)
    content = load_checkpoint(path)
    _check_scaling(content["config"], place.config, path)
    try:
        model.load_state_dict(content["model"])
    except RuntimeError as error:
        raise InputError(f"the model in {path} is not that of {run_dir / 'config.yaml'}: {error}") from error
    _log.info("encoder of step %d from %s", content["step"], path)
    return trained_encoder(model.to(place.device)), str(content["step"])


def _plain_model(config: Config) -> Model:
    """The run's model with plain BatchNorm: in evaluation there is one view and no other rank's rows."""
    plain = replace(config.model, encoder_batch_norm="joint", projector_batch_norm="joint", batch_norm_ranks="local")
    return build_model(replace(config, model=plain), Ranks())


def _check_scaling(trained: dict[str, Any], config: Config, path: Path) -> None:
    for key in ("mean", "std"):
        then, now = trained[f"views.{key}"], list(getattr(config.views, key))
        if then != now:
            raise InputError(f"views.{key} is {now}, but {path} was trained with {then}: evaluate with the same")


def _check_classes(train: Features, test: Features) -> None:
    if train.class_names != test.class_names:
        missing = sorted(set(train.class_names) ^ set(test.class_names))
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
