"""Measure one encoder and write the results. Needs nothing of the training loop."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import find_ranks
from trainer.errors import InputError
from trainer.evaluate.encoders import RunEvaluator, check_classes, open_foreign
from trainer.evaluate.evaluator import Evaluator
from trainer.evaluate.features import Encode
from trainer.evaluate.report import print_table
from trainer.evaluate.results import Source
from trainer.run.folder import start_logging


def run_evaluation(
    run_dir: Path, which: str, settings: Sequence[str], names: Sequence[str] | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Evaluate `which` ("last", a step, a file, "random": the untrained encoder, "pixels": no encoder) of a run.

    Prints {protocol: result} as JSON to stdout and returns it; it is empty on all ranks but rank 0. Writes each result to
    DIR/eval, or all results to the file `out`.

    settings: command-line words that override the run's config. names: protocols; None: those of `evaluate.protocols`.
    """
    ranks = find_ranks()
    start_logging(None, ranks.rank)
    evaluator = RunEvaluator(run_dir, settings, ranks, out)
    return _measure(evaluator, lambda: evaluator.encoder(which), names, which, out or run_dir / "eval")


def run_foreign_evaluation(
    encoder: str,
    configs: Sequence[Path],
    settings: Sequence[str],
    names: Sequence[str] | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Evaluate an encoder of any source of `trainer.export.load_encoder`, as `run_evaluation` does.

    configs, settings: files and command-line words with the data set. out: file for the results; None: they are printed."""
    ranks = find_ranks()
    start_logging(None, ranks.rank)
    evaluator, loaded, source = open_foreign(encoder, configs, settings, ranks, out)

    # The classes are compared after the process group has started, because all ranks open the splits together.
    def checked() -> tuple[Encode, Source]:
        check_classes(evaluator, loaded.class_names, encoder)
        return loaded, source

    return _measure(evaluator, checked, names, source.name, out)


def _measure(
    evaluator: Evaluator,
    load: Callable[[], tuple[Encode, Source]],
    names: Sequence[str] | None,
    which: str,
    place: Path | None,
) -> dict[str, Any]:
    """Load the encoder, run the protocols, and print and write the results. place: where they are written."""
    ranks = evaluator.place.ranks
    # Rank 0 checks that results can be written before any rank starts to work.
    with process_group(evaluator.config, ranks, evaluator.place.device, first=evaluator.results.check):
        protocols = evaluator.protocols(names or evaluator.config.evaluate.protocols, which)
        evaluator.check(protocols)
        encode, source = load()
        found: dict[str, Any] = {}
        failure = None
        try:
            for name, result in evaluator.measure(encode, source, protocols):
                found[name] = result
                # Write each result at once, because the next protocol may take hours.
                try:
                    evaluator.results.write(source, name, result)
                except OSError as error:
                    failure = error
        except BaseException:
            # An error or an interruption must not lose the results of the protocols before it.
            _show(evaluator, source, found)
            raise
    # In the order in which the protocols were asked for; empty on all ranks but rank 0.
    results = {name: found[name] for name in protocols if name in found}
    failure = _show(evaluator, source, results) or failure
    if failure:
        raise InputError(
            f"cannot write the figures above to {place}: {failure.strerror}. Free some space, or choose another file with "
            "--out FILE"
        ) from failure
    return results


def _show(evaluator: Evaluator, source: Source, results: dict[str, Any]) -> OSError | None:
    """Print the results, and write them to the file of --out. Returns the error if that fails."""
    if not results:
        return None
    print_table(source.name, results)
    # Print before writing, so that a full disk does not lose the figures.
    # In a terminal the details would push the table off the screen; they are in the files of the results.
    if not sys.stdout.isatty():
        print(json.dumps(results, indent=1), flush=True)
    try:
        evaluator.results.write_out(results)
    except OSError as error:
        return error
    return None
