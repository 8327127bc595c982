"""Options of `wmse report`, and the steps from run folders to the page."""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cluster.runs import find_runs
from trainer.data.printable import printable
from trainer.errors import DONE, InputError
from trainer.files import write_text

if TYPE_CHECKING:
    from trainer.report.collect import Run
    from trainer.report.page import Shown

_VIEWED = 4  # images of the grid of views
_log = logging.getLogger(__name__)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of run folders, shown side by side"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: RUN/report.html; ./report.html for several runs)",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=2000,
        metavar="N",
        help="largest number of images of each split that are encoded for neighbours and map (default 2000)",
    )
    parser.add_argument(
        "--no_images",
        action="store_true",
        help="omit views, neighbours and map, which need the data set and encode images",
    )


def run_report(options: argparse.Namespace) -> int:
    """Write the page and print its path. Returns the exit code."""
    if options.images < 2:
        raise InputError(f"--images is {options.images}: give at least 2, or --no_images")
    path = write_report(options.runs, options.out, 0 if options.no_images else options.images)
    print(printable(str(path)))
    return DONE


def write_report(folders: Sequence[Path], out: Path | None, num_images: int) -> Path:
    """Write the page and return its path. num_images: of each split to encode; 0: show no images.

    Raises InputError if a folder is not a run, and OSError if the page cannot be written."""
    run_dirs = find_runs(folders)
    # The page of one run belongs into its folder; that of several runs belongs to none of them.
    folder = run_dirs[0] if len(run_dirs) == 1 else Path()
    path = out or folder / "report.html"
    if path.is_dir():
        raise InputError(f"--out {path} is a folder: give the name of a file, such as {path / 'report.html'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # These imports take seconds.
    from trainer.cluster.status import describe_runs
    from trainer.report.collect import collect_run
    from trainer.report.page import render
    from trainer.run.folder import start_logging

    start_logging(None, 0)
    rows = describe_runs(run_dirs)
    # Read the files of all runs before the first picture, so that the curves show about the same time.
    runs = [collect_run(*about) for about in zip(run_dirs, _names(run_dirs), rows, strict=True)]
    shown = [_with_pictures(run, num_images) for run in runs]
    write_text(path, render(shown))
    return path


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a short name for each run: that of its folder, or the whole path where two folders have the same name."""
    names = [printable(run_dir.absolute().name) for run_dir in run_dirs]
    paths = [printable(str(run_dir)) for run_dir in run_dirs]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


def _with_pictures(run: Run, num_images: int) -> Shown:
    """Draw what needs the data set. A picture that cannot be drawn leaves a reason on the page and in the log."""
    from trainer.report.page import Shown
    from trainer.report.pictures import draw_pictures

    if not num_images:
        return Shown(run)
    if run.config is None:
        return Shown(run, problems=["images need the settings in config.yaml, which cannot be read"])
    views = ""
    pictures = None
    problems = []
    # Two tries, because the views need only the training images, and the other pictures also a checkpoint.
    try:
        views = _draw_views(run)
    except (InputError, OSError) as error:
        problems.append(f"no views: {error}")
    try:
        pictures = draw_pictures(run.folder, num_images)
    except (InputError, OSError) as error:
        problems.append(f"no neighbours and no map: {error}")
    for problem in problems:
        _log.warning("%s: %s", printable(str(run.folder)), problem)
    return Shown(run, views, pictures, problems)


def _draw_views(run: Run) -> str:
    """Return the grid of views as a data URI."""
    from PIL import Image

    from trainer.report.pictures import data_uri
    from trainer.tools.preview import write_preview

    assert run.config is not None
    # `wmse preview` writes a file, which is read back.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "views.png"
        write_preview(run.config, _VIEWED, path)
        with Image.open(path) as image:
            return data_uri(image)
