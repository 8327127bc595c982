"""Measure one encoder of a run: read a checkpoint and write DIR/eval/*.json. Needs nothing of the training loop."""

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
    run_dir: Path, which: str, settings: Sequence[str], names: Sequence[str] | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Evaluate `which` ("last", a step, a file, "random": the untrained encoder, "pixels": no encoder) of a run.

    Prints {protocol: result} as JSON to stdout and returns it; it is empty on all ranks but rank 0. Writes each result to
    DIR/eval, or all results to the file `out`.

    settings: command-line words that override the run's config. names: protocols; None: those of `evaluate.protocols`.
    """
    ranks = find_ranks()
    start_logging(None, ranks.rank)
    evaluator = Evaluator(run_dir, settings, ranks, out)
    # Rank 0 checks that results can be written before any rank starts to work.
    with process_group(evaluator.config, ranks, evaluator.place.device, first=evaluator.results.check):
        protocols = evaluator.protocols(names or evaluator.config.evaluate.protocols, which)
        evaluator.check(protocols)
        encode, source = evaluator.encoder(which)
        found = dict(evaluator.measure(encode, source, protocols))
    results = {name: found[name] for name in protocols if name in found}
    if results:
        print_table(source.name, results)
        # Print before writing, so that a full disk does not lose the figures.
        print(json.dumps(results, indent=1), flush=True)
        try:
            evaluator.results.write(source, results)
        except OSError as error:
            place = out or run_dir / "eval"
            raise InputError(
                f"cannot write the figures above to {place}: {error.strerror}. Free some space, or choose another file "
                "with --out FILE"
            ) from error
    return results
