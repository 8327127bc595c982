"""Keep results as RUN_DIR/eval/*.json. A result never overwrites that of another measurement.

MEASURE_NAME.json         of the run's own checkpoint (NAME is its step), "random" or "pixels", with the run's own settings
MEASURE_NAME_DIGEST.json  of other settings, another set or another run's checkpoint; or a result that had the first name,
                          renamed because the images or the checkpoint have changed since
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from trainer.cluster.runs import read_json
from trainer.config.changes import plain_settings
from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.evaluate.report import FIGURES
from trainer.files import write_text
from trainer.run.checkpoint_files import checkpoint_path
from trainer.run.tensorboard import draw_evaluation

_log = logging.getLogger(__name__)
_ROOM_BYTES = 1 << 16  # several times the size of one encoder's results
# settings, or beginnings of their names, that affect a figure: of every measure, and of some
_SHAPING = ("views.size", "views.eval_resize", "views.interpolation", "evaluate.precision")
_SHAPING_OF = {
    "linear": ("seed", "evaluate.probe_"),
    "knn": ("evaluate.knn_k",),
    "random": ("seed", "model.", "views.mean", "views.std", "data.train_split", "evaluate.images_per_batch"),
}
# keys that are equal in two results of the same measurement
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
    """Whose features are measured."""

    name: str
    """The step of a checkpoint, "random" or "pixels"."""
    path: Path | None = None
    """The checkpoint; None: there is none."""
    sha256: str | None = None
    """Digest of the checkpoint's content, as it says itself."""


class Results:
    """The results of one run. config: the settings of the measurement; own: those of the run. out: a file instead of eval/."""

    def __init__(self, run_dir: Path, own: Config, config: Config, out: Path | None = None) -> None:
        self._run_dir = run_dir
        self._own = own
        self._config = config
        self._out = out
        self._can_keep = True

    def check(self, *, must_keep: bool = False) -> None:
        """Check before the work whether results can be kept, and warn if not; they are printed in any case.

        Raises InputError for an `out` that exists or can't be written and, with must_keep, if eval/ can't be written."""
        if self._out is not None and self._out.exists():
            raise InputError(f"--out {self._out} exists already: give a new name, so that no result is lost")
        folder = self._run_dir / "eval" if self._out is None else self._out.absolute().parent
        try:
            if self._out is None:
                folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_ROOM_BYTES))
                file.flush()
                os.fsync(file.fileno())  # a full disk may say so only here
        except OSError as error:
            if self._out is not None or must_keep:
                raise InputError(
                    f"can't write to {folder}: {error.strerror}; free some space or name another place"
                ) from error
            self._can_keep = False
            _log.warning(
                "can't write to %s: %s. The figures will be printed only; --out FILE keeps them elsewhere",
                folder,
                error.strerror,
            )

    def owns(self, source: Source) -> bool:
        """Whether a checkpoint is the run's own: the file that lies in its folder under the name of its step."""
        if source.path is None:
            return True
        return source.path.resolve() == checkpoint_path(self._run_dir / "checkpoints", int(source.name)).resolve()

    def about(self, measure: str, source: Source) -> dict[str, Any]:
        """Return what a result says about checkpoint, splits and settings."""
        is_step = source.path is not None
        return {
            "checkpoint": source.name,
            "step": int(source.name) if is_step else None,
            "checkpoint_path": str(source.path.absolute()) if source.path else None,
            "checkpoint_sha256": source.sha256,
            "checkpoint_of_this_run": self.owns(source) if is_step else None,
            **_conditions(self._config, measure, source.name),
        }

    def path(self, measure: str, source: Source) -> Path:
        """Return the file for the result of a measurement."""
        conditions = _conditions(self._config, measure, source.name)
        other: list[Any] = [] if conditions == _conditions(self._own, measure, source.name) else [conditions]
        if not self.owns(source):
            other.append(source.sha256)
        suffix = f"_{_digest(other)}" if other else ""
        return self._run_dir / "eval" / f"{measure}_{source.name}{suffix}.json"

    def write(self, source: Source, results: dict[str, dict[str, Any]]) -> None:
        """Keep {measure: result}, unless `check` found that this is impossible. Raises OSError if it fails."""
        if not self._can_keep:
            _log.warning("the figures were printed, but not kept: eval/ can't be written")
            return
        if self._out is not None:
            write_text(self._out, json.dumps(results, indent=1) + "\n")
            _log.info("written to %s", self._out)
            return
        for measure, result in results.items():
            path = self.path(measure, source)
            path.parent.mkdir(exist_ok=True)
            for rest in path.parent.glob(f".{path.name}.*"):  # left by an evaluator that was ended while it wrote
                rest.unlink(missing_ok=True)
            _set_aside_other(path, result)
            self._draw(measure, source, result)  # before the file, which marks the measurement as complete
            write_text(path, json.dumps(result, indent=1) + "\n")
            _log.info("written to %s", path)

    def _draw(self, measure: str, source: Source, result: dict[str, Any]) -> None:
        """Show the result of the run's own checkpoint and settings in TensorBoard, beside the curves of the training."""
        is_own = source.path and self.path(measure, source).name == f"{measure}_{source.name}.json"
        if self._config.log.tensorboard and is_own:
            figures = {f"{measure}_{figure}": result[figure] for figure in FIGURES if figure in result}
            draw_evaluation(self._run_dir, int(source.name), figures)


def _set_aside_other(path: Path, result: dict[str, Any]) -> None:
    before = read_json(path, [])
    if "top1" not in before or all(before.get(key) == result[key] for key in _IDENTITY):
        return
    kept = path.with_name(f"{path.stem}_{_digest(before)}.json")
    path.rename(kept)
    _log.info("%s was measured on other images or another checkpoint: renamed to %s", path.name, kept.name)


def _conditions(config: Config, measure: str, name: str) -> dict[str, Any]:
    """Return the splits and settings of a measurement."""
    shaping = (*_SHAPING, *_SHAPING_OF[measure], *_SHAPING_OF.get(name, ()))
    return {
        "data_root": str(Path(config.data.root).expanduser().resolve()),
        "train_split": config.data.probe_split or config.data.train_split,
        "test_split": config.data.test_split,
        "settings": {key: value for key, value in plain_settings(config).items() if key.startswith(shaping)},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
