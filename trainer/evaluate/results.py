"""Keep results as RUN_DIR/eval/*.json. A result never overwrites the result of another measurement.

PROTOCOL_NAME.json        measures a checkpoint of this run (NAME is its step), "random" or "pixels", with this run's settings
PROTOCOL_NAME_DIGEST.json measures with other settings, on another set, or another run's checkpoint; or it is an earlier
                          PROTOCOL_NAME.json, renamed because the images or the checkpoint have changed since
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.cluster.runs import read_json
from trainer.config.changes import plain_settings
from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.evaluate.features import Split
from trainer.files import write_text
from trainer.run.checkpoint_files import checkpoint_path
from trainer.run.tensorboard import draw_evaluation

_log = logging.getLogger(__name__)
_ROOM_BYTES = 1 << 16  # several times the size of one encoder's results
# Settings, or beginnings of their names, that affect the figures of every protocol, and those of an untrained encoder.
_SHAPING = ("views.size", "views.eval_resize", "views.interpolation", "evaluate.precision")
_SHAPING_OF_RANDOM = ("seed", "model.", "views.mean", "views.std", "data.train_split", "evaluate.images_per_batch")
# Keys whose values are equal in two results of the same measurement.
_IDENTITY = (
    "data_root",
    "train_split",
    "test_split",
    "settings",
    "checkpoint_sha256",
    "train_fingerprint",
    "test_fingerprint",
)


class Source(NamedTuple):
    """Source of the features that are measured."""

    name: str
    """The step of a checkpoint, "random", "pixels", or the name of an encoder that belongs to no run."""
    path: Path | None = None
    """The checkpoint; None for "random" and "pixels"."""
    sha256: str | None = None
    """Digest of the checkpoint's content, as stored in the checkpoint."""
    cost: dict[str, Any] | None = None
    """Cost of the training up to the checkpoint, as stored in it; None if it is unknown."""


class Results:
    """Results of the evaluation of one run, as files."""

    def __init__(
        self,
        run_dir: Path | None,
        config_of_run: Config,
        config: Config,
        shaping: Mapping[str, tuple[str, ...]],
        out: Path | None = None,
    ) -> None:
        """config: the settings of the measurement. shaping: `Protocol.settings` by the name of the protocol.

        run_dir: None for an encoder that belongs to no run. out: file for all results; None: files in RUN_DIR/eval, or without
        a run no files."""
        self._shaping = shaping
        self._run_dir = run_dir
        self._config_of_run = config_of_run
        self._config = config
        self._out = out
        self._can_keep = run_dir is not None or out is not None

    def check(self, *, must_keep: bool = False) -> None:
        """Check before the work whether results can be written, and warn if not: they will only be printed then.

        Raises InputError if `out` exists or cannot be written, and with must_keep also if eval/ cannot be written."""
        if self._out is not None and self._out.exists():
            raise InputError(f"--out {self._out} exists already: give a new name, since results are not overwritten")
        if not self._can_keep:
            return
        folder = self._folder if self._out is None else self._out.absolute().parent
        try:
            if self._out is None:
                folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_ROOM_BYTES))
                file.flush()
                os.fsync(file.fileno())  # some file systems report a full disk only here
        except OSError as error:
            if self._out is not None or must_keep:
                raise InputError(
                    f"cannot write to {folder}: {error.strerror}; free some space or choose another folder"
                ) from error
            self._can_keep = False
            _log.warning(
                "cannot write to %s: %s. The figures will only be printed; use --out FILE to write them to another folder",
                folder,
                error.strerror,
            )

    @property
    def _folder(self) -> Path:
        assert self._run_dir is not None
        return self._run_dir / "eval"

    def owns(self, source: Source) -> bool:
        """Return whether the source belongs to this run: its checkpoint lies in the run folder under the name of its step."""
        if source.path is None or self._run_dir is None:
            return True
        path_in_run = checkpoint_path(self._run_dir / "checkpoints", int(source.name))
        return source.path.resolve() == path_in_run.resolve()

    def about(self, protocol: str, source: Source) -> dict[str, Any]:
        """Return the part of a result that describes checkpoint, splits and settings."""
        is_step = source.path is not None
        return {
            "checkpoint": source.name,
            "step": int(source.name) if is_step else None,
            "checkpoint_path": str(source.path.absolute()) if source.path else None,
            "checkpoint_sha256": source.sha256,
            "checkpoint_of_this_run": self.owns(source) if is_step else None,
            "training_cost": source.cost,
            **self._conditions(self._config, protocol, source.name),
        }

    def identity(self, protocol: str, source: Source, train: Split, test: Split) -> str:
        """Return a text that is equal only for the same measurement of the same weights on the same images."""
        conditions = self._conditions(self._config, protocol, source.name)
        return _digest([protocol, source.sha256, train.index.fingerprint, test.index.fingerprint, conditions])

    def state_path(self, protocol: str, source: Source) -> Path | None:
        """Return the file for the progress of a measurement; None if nothing can be written."""
        if not self._can_keep:
            return None
        # `write` deletes files of such names when the result is written.
        path = self._out or self.path(protocol, source)
        return path.with_name(f".{path.name}.{protocol}_state")

    def path(self, protocol: str, source: Source) -> Path:
        """Return the file for the result of a measurement."""
        conditions = self._conditions(self._config, protocol, source.name)
        # A plain name belongs to the run's checkpoint, measured with the run's settings.
        # The digest covers whatever differs from the run's settings and checkpoints.
        differences: list[Any] = []
        if conditions != self._conditions(self._config_of_run, protocol, source.name):
            differences.append(conditions)
        if not self.owns(source):
            differences.append(source.sha256)
        suffix = f"_{_digest(differences)}" if differences else ""
        return self._folder / f"{protocol}_{source.name}{suffix}.json"

    def _conditions(self, config: Config, protocol: str, name: str) -> dict[str, Any]:
        """Return the splits and settings of a measurement of the encoder `name`."""
        # Only settings that affect the figures count: two results that differ in others are the same measurement.
        shaping = (*_SHAPING, *self._shaping[protocol], *(_SHAPING_OF_RANDOM if name == "random" else ()))
        settings = plain_settings(config)
        return {
            "data_root": str(Path(config.data.root).expanduser().resolve()),
            "train_split": config.data.probe_split or config.data.train_split,
            "test_split": config.data.test_split,
            "settings": {key: value for key, value in settings.items() if key.startswith(shaping)},
        }

    def write(self, source: Source, protocol: str, result: dict[str, Any]) -> None:
        """Write a result to the run folder, unless there is none or `check` found that this is impossible. Raises OSError."""
        if self._out is not None:
            return
        if not self._can_keep:
            if self._run_dir is not None:
                _log.warning("the figures are only printed, because %s cannot be written", self._folder)
            return
        path = self.path(protocol, source)
        path.parent.mkdir(exist_ok=True)
        # Other images or weights under the same name are another measurement, whose result is kept.
        _rename_if_other(path, result)
        # Draw before the file is written, because the file marks the measurement as complete.
        self._draw(protocol, source, result)
        write_text(path, json.dumps(result, indent=1) + "\n")
        _remove_leftovers(path)
        _log.info("wrote the result to %s", path)

    def write_out(self, results: dict[str, dict[str, Any]]) -> None:
        """Write {protocol: result} to the file `out`, if there is one. Raises OSError."""
        if self._out is not None:
            write_text(self._out, json.dumps(results, indent=1) + "\n")
            _remove_leftovers(self._out)
            _log.info("wrote the results to %s", self._out)

    def _draw(self, protocol: str, source: Source, result: dict[str, Any]) -> None:
        """Add the result to the run's TensorBoard curves, if it is of the run's checkpoints and settings."""
        is_of_run = source.path and self.path(protocol, source).name == f"{protocol}_{source.name}.json"
        if not (self._config.log.tensorboard and is_of_run and self._run_dir):
            return
        # TensorBoard's tags name the protocol, because several protocols have a top-1.
        figures = {f"{protocol}_{figure}": result[figure] for figure in result["figures"]}
        draw_evaluation(self._run_dir, int(source.name), figures)


def _remove_leftovers(path: Path) -> None:
    """Remove the progress of this measurement, and the temporary files of an evaluator that was ended while it wrote."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*"):
        leftover.unlink(missing_ok=True)


def _rename_if_other(path: Path, result: dict[str, Any]) -> None:
    """Rename the result in `path` if it measured other images or another checkpoint than `result`."""
    before = read_json(path, [])
    # The same measurement may be repeated; the new result then replaces the old one.
    is_same = all(before.get(key) == result[key] for key in _IDENTITY)
    if "figures" not in before or is_same:
        return
    kept = path.with_name(f"{path.stem}_{_digest(before)}.json")
    path.rename(kept)
    _log.info("renamed %s to %s, because it measured other images or another checkpoint", path.name, kept.name)


def _digest(value: Any) -> str:
    """Return eight hexadecimal digits that identify a JSON value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
