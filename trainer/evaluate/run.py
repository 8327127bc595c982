"""Measures the encoder of a run once: a process of its own, which reads a checkpoint and writes DIR/eval/*.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.cluster.ranks import find_ranks
from trainer.distributed import process_group
from trainer.evaluate.evaluator import Evaluator
from trainer.evaluate.report import print_table
from trainer.run_folder import start_logging


def run_evaluation(run_dir: Path, which: str, settings: Sequence[str], measures: Sequence[str]) -> dict[str, Any]:
    """Evaluate `which` ("last", a step, a file, "random": the untrained encoder, "pixels": no encoder) of a run.

    settings: command-line words over the run's config. measures: of "linear" and "knn". Returns {measure: result}, the same
    that is written to DIR/eval/MEASURE_STEP.json.
    """
    ranks = find_ranks()
    start_logging(None, ranks.rank)
    evaluator = Evaluator(run_dir, settings, ranks)
    with process_group(ranks, evaluator.place.device, evaluator.config.timeout_minutes):
        encode, name = evaluator.encoder(which)
        results = dict(evaluator.measure(encode, name, measures))
    for measure, result in results.items():
        evaluator.write(measure, name, result)
    if results:  # the first rank's
        print_table(name, results)
    return results
