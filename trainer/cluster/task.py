"""What submitit runs on every task of a job: one `wmse` command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from submitit.helpers import DelayedSubmission


class WmseTask:
    """A `wmse` command, pickled by submitit. Its exit code becomes the task's, so that the batch script can requeue the job."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def __call__(self) -> None:
        from trainer.cli import main

        logging.getLogger("submitit").propagate = False  # its lines belong to the job's output, not to the run's log
        code = main(self.words)
        if code:
            sys.exit(code)

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit for a signal that comes before the command listens to signals: the same command again."""
        return DelayedSubmission(self)
