"""Files of features: .npz and .parquet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from trainer.errors import InputError
from trainer.export.compute import ImageFeatures
from trainer.files import atomic_write

_SUFFIXES = (".npz", ".parquet")


def check_output(path: Path, overwrite: bool) -> None:
    """Raise InputError if the features cannot be written to `path`, before any of them is computed."""
    if path.suffix not in _SUFFIXES:
        raise InputError(f"cannot write features to {path}: give a file name that ends in {' or '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.is_dir() or (path.exists() and not overwrite):
        raise InputError(f"{path} exists: give another file, or --overwrite")
    # pyarrow is optional, and its absence must not show only after hours of work.
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise InputError(
                "a .parquet file needs pyarrow: run `pip install pyarrow`, or write a .npz file"
            ) from error


def write_features(result: ImageFeatures, path: Path) -> None:
    """Write features, names, labels (if there are any) and class names to an .npz or .parquet file, atomically."""
    has_labels = bool((result.labels >= 0).any())
    if path.suffix == ".npz":
        columns = {"features": result.features, "names": np.array(result.names)}
        if has_labels:
            columns |= {"labels": result.labels, "class_names": np.array(result.class_names)}
        with atomic_write(path) as file:
            np.savez(file, **columns)  # type: ignore[arg-type] # its stub takes every name for allow_pickle
        return
    import pyarrow
    from pyarrow import parquet

    # A column of lists of equal length keeps each feature vector in one cell.
    flat = pyarrow.array(result.features.reshape(-1))
    arrays = {
        "name": pyarrow.array(result.names),
        "features": pyarrow.FixedSizeListArray.from_arrays(flat, result.features.shape[1]),
    }
    metadata = {}
    if has_labels:
        arrays["label"] = pyarrow.array(result.labels)
        metadata["class_names"] = json.dumps(result.class_names)
    table = pyarrow.table(arrays).replace_schema_metadata(metadata)
    with atomic_write(path) as file:
        parquet.write_table(table, file)
