"""Measure the encoder of a run once, in a process of its own: read a checkpoint and write DIR/eval/*.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import find_ranks
from trainer.errors import InputError
from trainer.evaluate.evaluator import Evaluator
from trainer.evaluate.report import print_table
from trainer.run.folder import start_logging


def run_evaluation(
    run_dir: Path, which: str, settings: Sequence[str], measures: Sequence[str], out: Path | None = None
) -> dict[str, Any]:
    """Evaluate `which` ("last", a step, a file, "random": the untrained encoder, "pixels": no encoder) of a run.

    settings: command-line words over the run's config. measures: of "linear" and "knn". Prints {measure: result} as JSON on
    stdout and returns it, empty on ranks but the first; each result is kept in DIR/eval, or all in the file `out`.
    """
    ranks = find_ranks()
    start_logging(None, ranks.rank)
    evaluator = Evaluator(run_dir, settings, ranks, out)
    with process_group(evaluator.config, ranks, evaluator.place.device, first=evaluator.results.check):
        evaluator.check(measures)
        encode, source = evaluator.encoder(which)
        results = dict(evaluator.measure(encode, source, measures))
    if results:
        print_table(source.name, results)
        print(json.dumps(results, indent=1), flush=True)  # before the files: a full disk must not lose the figures
        try:
            evaluator.results.write(source, results)
        except OSError as error:
            place = out or run_dir / "eval"
            raise InputError(
                f"the figures above were printed, but not kept in {place}: {error.strerror}; free some space, or keep them "
                "elsewhere with --out FILE"
            ) from error
    return results
