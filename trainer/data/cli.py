"""`wmse prepare` and `wmse check-data` on the command line."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from trainer.errors import DONE, FAILED, InputError

_DEFAULT_QUALITY = 90


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wmse prepare`, and the sources that it recognises."""
    # Loads the readers of all layouts, which the other commands do not need.
    from trainer.data.original_layouts import describe_layouts

    parser.epilog = (
        "SOURCE is a name (fashion-mnist, cifar10, cifar100, stl10), which is downloaded, or the path of one of these:\n"
        f"{describe_layouts()}\n"
        "Images without labels are prepared as well. docs/data.md names the download and the recipe of each data set."
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="name of a data set, a download in its original layout, or an image folder (see below)",
    )
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to create")
    parser.add_argument(
        "--max_side",
        type=int,
        metavar="PIXELS",
        help="downscale images whose longer side exceeds PIXELS and re-encode them as JPEG: faster to load, slightly "
        "different pixels (default: keep all images as they are)",
    )
    parser.add_argument(
        "--quality",
        type=int,
        metavar="Q",
        help=f"JPEG quality of downscaled images, 1 to 100 (default {_DEFAULT_QUALITY})",
    )
    parser.add_argument(
        "--classes",
        type=Path,
        metavar="FILE",
        help="take only the classes listed in this file, one name on each line (configs/imagenet100_classes.txt)",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        metavar="SPLIT",
        help="take only these splits (default: all splits of SOURCE)",
    )


def run_prepare(own: argparse.Namespace) -> int:
    """Prepare the data set and return the exit code."""
    # These modules load torchvision, so they are imported only when the command runs.
    from trainer.data.prepare import prepare
    from trainer.data.shard_writer import Shrink

    # Images that are not downscaled are stored byte for byte, whatever the quality.
    if own.quality is not None and own.max_side is None:
        raise InputError("--quality only applies together with --max_side: give --max_side PIXELS as well")
    shrink = None
    if own.max_side is not None:
        quality = _DEFAULT_QUALITY if own.quality is None else own.quality
        shrink = Shrink(own.max_side, quality)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    prepare(own.source, own.dest, splits=own.splits, shrink=shrink, classes=own.classes)
    return DONE


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wmse check-data`."""
    parser.add_argument("path", type=Path, metavar="PATH", help="prepared set, tar shards or image folder")
    parser.add_argument("--splits", nargs="+", metavar="SPLIT", help="check only these splits (default: all)")
    parser.add_argument(
        "--max_image_pixels",
        metavar="N",
        help="largest image in pixels, as data.max_image_pixels of a config",
    )
    parser.add_argument(
        "--max_classes",
        metavar="N",
        help="largest number of classes, as data.max_classes of a config",
    )


def run_check(own: argparse.Namespace) -> int:
    """Check the data set and print each bad file as it is found. Return the exit code: FAILED if there is a bad file."""
    # Imported late for the same reason as above: `wmse --help` stays fast.
    from trainer.config.loading import load_config
    from trainer.data.verify import check_data

    # Pass the limits through a config, so that the same ranges and error messages apply as in training.
    given = {"max_image_pixels": own.max_image_pixels, "max_classes": own.max_classes}
    overrides = [f"--data.{name}={value}" for name, value in given.items() if value is not None]
    limits = load_config(None, overrides).data
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Print each bad file at once: a large data set takes hours.
    report = check_data(
        own.path,
        splits=own.splits,
        progress=True,
        limits=limits,
        on_bad=lambda name, problem: print(f"{name}: {problem}", flush=True),
    )
    # The bad files have been printed already; a summary follows.
    for line in report.splits:
        print(line)
    for note in report.notes:
        print(f"note: {note}")
    print(f"{report.checked} files, {len(report.bad)} bad, {report.converted} valid but unusual (converted when read)")
    # Notes alone are no failure.
    return FAILED if report.bad else DONE
