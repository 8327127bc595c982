"""Callable that submitit runs in every task of a job: one `wmse` command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from submitit.helpers import DelayedSubmission


class WmseTask:
    """A `wmse` command, pickled by submitit.

    The task ends with its exit code, by which the batch script requeues the job."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def __call__(self) -> None:
        from trainer.cli import main

        logging.getLogger("submitit").propagate = False  # keeps submitit's lines out of the run's log
        code = main(self.words)
        if code:
            sys.exit(code)

    def checkpoint(self) -> DelayedSubmission:
        """Return the same command again.

        submitit calls this for a signal that arrives before the command handles signals."""
        return DelayedSubmission(self)
