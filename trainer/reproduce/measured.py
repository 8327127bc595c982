"""Results of a run that count for its reproduction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.schema import Config
from trainer.report.collect import Result, read_results
from trainer.sweep.progress import find_result, last_checkpoint, protocols_of


def measured(config: Config, found: dict[str, dict[str, Any]]) -> dict[str, Result]:
    """Return {protocol: result} of the last checkpoint, measured with these settings on these images.

    found: facts of the splits, from `check_data`."""
    # The last checkpoint is that of the last epoch, which a later comparison with the recipe needs.
    results = read_results(Path(config.run_dir) / "eval", None, [])
    checkpoint = last_checkpoint(config)
    data = config.data
    digests = {
        "train_fingerprint": found[data.probe_split or data.train_split]["fingerprint"],
        "test_fingerprint": found[data.test_split]["fingerprint"],
    }
    chosen = {}
    for protocol in protocols_of(config):
        result = find_result(results, config, protocol, checkpoint)
        # Images may have changed under the same name since the measurement.
        if result and all(result.content.get(key) == digest for key, digest in digests.items()):
            chosen[protocol] = result
    return chosen
