"""Evaluator: measures encoders by the protocols."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from trainer.config.schema import Config
from trainer.distributed.device import PRECISION_NAMES, choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.evaluate.diagnostics import DIAGNOSTICS
from trainer.evaluate.features import Encode, Place, Split, encoding_dtype
from trainer.evaluate.finetune import FINETUNE
from trainer.evaluate.knn import KNN, KNN_COSINE
from trainer.evaluate.linear import FEW_LABELS, LINEAR
from trainer.evaluate.linear_sgd import LINEAR_SGD
from trainer.evaluate.protocol import Protocol, Subject
from trainer.evaluate.results import Results, Source
from trainer.evaluate.splits import classes_with_images, open_splits, unusable_files
from trainer.run.certificate import find_certificate, summary
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
    """Measures encoders on the splits of a data set, which it opens once for all of them."""

    def __init__(self, config: Config, ranks: Ranks, results: Results) -> None:
        self.config = config
        self.results = results
        self.place = Place(config, ranks, choose_device(replace(config, deterministic=False), ranks))

    @cached_property
    def splits(self) -> tuple[Split, Split]:
        """The split that the protocols learn from, and the split that they are tested on."""
        return open_splits(self.place)

    @cached_property
    def _certificate(self) -> dict[str, Any] | None:
        """The summary of the certificate of `wmse verify` that holds for this code and device; None if there is none."""
        return summary(find_certificate(self.place.device))

    def protocols(self, names: Sequence[str], which: str) -> list[str]:
        """Return the names of the protocols to run. names: from `evaluate.protocols`, or those of a command.

        which: as for `run_evaluation`. Raises InputError if a protocol is named that cannot measure it."""
        chosen = list(PROTOCOLS) if "all" in names else list(names)
        # "all" means all that are possible; a protocol that is named must not be left out silently.
        refused = [name for name in chosen if which == "pixels" and PROTOCOLS[name].trains_encoder]
        if refused and "all" not in names:
            raise InputError(f"{', '.join(refused)} trains the encoder, but raw pixels have none: remove it")
        return [name for name in chosen if name not in refused]

    def check(self, names: Sequence[str]) -> None:
        """Open the splits. Every rank calls this. Raises InputError if the splits do not allow these protocols."""
        for name in names:
            PROTOCOLS[name].check(self.config, *self.splits)

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
        # Images that could not be read do not count for their class.
        learnt = train.labels.unique().tolist() if train else classes_with_images(train_split)
        tested = test.labels.unique().tolist()
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
            "certificate": self._certificate,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def shaping_settings() -> dict[str, tuple[str, ...]]:
    """Return `Protocol.settings` by the name of the protocol."""
    return {name: protocol.settings for name, protocol in PROTOCOLS.items()}
