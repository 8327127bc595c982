"""`wmse prepare` and `wmse check-data` on the command line."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from trainer.errors import DONE, FAILED, InputError


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wmse prepare`."""
    parser.add_argument(
        "source", metavar="SOURCE", help="an image folder in ImageNet's layout, or fashion-mnist, cifar10, ..."
    )
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to make")
    parser.add_argument(
        "--max_side",
        type=int,
        metavar="PIXELS",
        help="shrink larger images to this longer side and store them as JPEG: faster to read and decode, but other "
        "pixels (default: keep all as they are)",
    )
    parser.add_argument("--quality", type=int, metavar="Q", help="quality of those JPEGs, 1 to 100 (default 90)")
    parser.add_argument(
        "--classes",
        type=Path,
        metavar="FILE",
        help="take only the classes listed in this file, one folder name a line (configs/imagenet100_classes.txt)",
    )
    parser.add_argument("--splits", nargs="+", metavar="SPLIT", help="take only these (default: all that SOURCE has)")


def run_prepare(own: argparse.Namespace) -> int:
    """Prepare the set; returns the exit code."""
    from trainer.data.prepare import prepare
    from trainer.data.shard_writer import Shrink

    if own.quality is not None and own.max_side is None:
        raise InputError("--quality applies only to images that are made smaller: give --max_side PIXELS, too")
    shrink = None if own.max_side is None else Shrink(own.max_side, 90 if own.quality is None else own.quality)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    prepare(own.source, own.dest, splits=own.splits, shrink=shrink, classes=own.classes)
    return DONE


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wmse check-data`."""
    parser.add_argument("path", type=Path, metavar="PATH", help="prepared set, tar shards or image folder")
    parser.add_argument("--splits", nargs="+", metavar="SPLIT", help="check only these (default: all)")
    parser.add_argument("--max_image_pixels", metavar="N", help="largest image, as data.max_image_pixels of a config")
    parser.add_argument("--max_classes", metavar="N", help="largest number of classes, as data.max_classes of a config")


def run_check(own: argparse.Namespace) -> int:
    """Check the set and print each bad file as it is found; returns the exit code, FAILED if there is one."""
    from trainer.config.loading import load_config
    from trainer.data.verify import check_data

    # through the config, so that its ranges and its messages hold here as well
    given = {"max_image_pixels": own.max_image_pixels, "max_classes": own.max_classes}
    limits = load_config(None, [f"--data.{name}={value}" for name, value in given.items() if value is not None]).data
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    report = check_data(
        own.path,
        splits=own.splits,
        progress=True,
        limits=limits,
        on_bad=lambda name, problem: print(f"{name}: {problem}", flush=True),
    )
    for line in (*report.splits, *(f"note: {note}" for note in report.notes)):
        print(line)
    print(f"{report.checked} files, {len(report.bad)} bad, {report.converted} valid but unusual (converted when read)")
    return FAILED if report.bad else DONE
