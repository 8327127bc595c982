"""`wmse export` and `wmse features` on the command line."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from trainer.errors import DONE

# The names in trainer.export.formats.FORMATS, whose import takes seconds, and all of them.
_FORMATS = ("timm", "torchvision", "onnx", "all")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wmse export`."""
    parser.add_argument("run", metavar="RUN", help="run folder, checkpoint file, or folder that was exported before")
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to create")
    parser.add_argument("--checkpoint", metavar="WHICH", help="of a run folder: last (the default), a step, or a file")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        default="all",
        help="format to write beside model.safetensors; all (the default): every one that can hold this encoder",
    )


def run_export(own: argparse.Namespace) -> int:
    """Export the encoder and return the exit code."""
    # These imports take seconds, which `--help` need not wait for.
    from trainer.export.folder import export
    from trainer.export.sources import load_encoder
    from trainer.run.checkpoint import choose_checkpoint
    from trainer.run.folder import start_logging

    start_logging(None, 0)
    for package in ("timm", "onnxscript", "onnx_ir"):  # they log each step of their work
        logging.getLogger(package).setLevel(logging.WARNING)
    source = own.run if own.checkpoint is None else choose_checkpoint(Path(own.run), own.checkpoint)
    files = export(load_encoder(source), own.dest, own.format)
    print(f"wrote {', '.join(files)} to {own.dest}")
    return DONE


def add_features_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wmse features`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="run folder, checkpoint file, exported folder, timm:NAME, torchvision:NAME, or weights of another program as "
        "timm:NAME=FILE or torchvision:NAME=FILE",
    )
    parser.add_argument(
        "images",
        type=Path,
        metavar="IMAGES",
        help="folder of images, or prepared set with --split",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write: .npz or .parquet",
    )
    parser.add_argument(
        "--split",
        default=".",
        metavar="SPLIT",
        help="split of a data set (default: the whole folder)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU if there is one)"
    )
    parser.add_argument(
        "--batch", type=int, default=256, metavar="N", help="images that are encoded at once (default 256)"
    )


def run_features(own: argparse.Namespace) -> int:
    """Compute and write the features, and return the exit code."""
    from trainer.config.schema import Config
    from trainer.distributed.device import choose_device
    from trainer.distributed.ranks import Ranks
    from trainer.export.compute import features
    from trainer.export.feature_files import check_output, write_features
    from trainer.export.sources import load_encoder
    from trainer.run.folder import start_logging

    start_logging(None, 0)
    # Before the images are encoded, which may take hours.
    check_output(own.out, own.overwrite)
    encoder = load_encoder(own.source, choose_device(Config(device=own.device), Ranks()))
    logging.getLogger(__name__).info("encoder %s, weights %s", encoder.name, encoder.sha256[:16])
    result = features(encoder, own.images, split=own.split, batch_size=own.batch)
    write_features(result, own.out)
    count, width = result.features.shape
    print(f"wrote {width} features of {count} images to {own.out}, skipped {len(result.skipped)}")
    return DONE
