"""Interface of a protocol: what it needs, which settings shape its figures, and the function that measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trainer.config.schema import Config
from trainer.evaluate.features import Encode, Features, Place, Split, extract


@dataclass
class Subject:
    """Encoder that is measured, and the splits that it is measured on. Features are computed when they are first used."""

    encode: Encode
    """A function from pixels to features; unless it is `raw_pixels`, a network with the parts `normalize` and `encoder`."""
    place: Place
    train_split: Split
    test_split: Split
    state_path: Path | None = None
    """File in which a protocol may keep its progress, to continue after an interruption; None: nothing can be kept."""
    identity: str = ""
    """Text that is equal only for the same encoder, images and settings, so that no other progress is continued."""

    encoded_train: Features | None = None
    """Features of the training split, if a protocol has used them."""

    @property
    def train(self) -> Features:
        """All features of the training split on rank 0. All ranks share the work, so every rank uses this, or none does."""
        # Only rank 0 gets all of them, because those of ImageNet take 10 GB.
        if self.encoded_train is None:
            self.encoded_train = extract(self.encode, self.train_split, self.place, to_all=False)
        return self.encoded_train

    @cached_property
    def test(self) -> Features:
        """All features of the test split, on all ranks."""
        return extract(self.encode, self.test_split, self.place)


def _no_check(config: Config, train: Split, test: Split) -> None:
    """Accept all settings."""


@dataclass(frozen=True)
class Protocol:
    """A way to measure an encoder."""

    measure: Callable[[Subject], dict[str, Any]]
    """Returns the result. `figures` in it names the keys of the numbers that tables and curves show, `label` the protocol."""
    needs: Literal["features", "loader"]
    """features: it only uses `Subject.train` and `Subject.test`, and runs on rank 0. loader: it reads images itself, and
    runs on all ranks."""
    settings: tuple[str, ...]
    """Settings, or beginnings of their names, that shape the figures beyond those of the features."""
    check: Callable[[Config, Split, Split], None] = _no_check
    """Raises InputError if the settings do not fit the splits, before any image is encoded."""
    trains_encoder: bool = False
    """Whether it trains the encoder, which raw pixels do not have."""
