"""Exceptions that end a command with a message, and exit codes of the commands."""

from __future__ import annotations

from collections.abc import Sequence

DONE = 0
FAILED = 1
BAD_INPUT = 2
PREEMPTED = 75
INTERRUPTED = 130


class InputError(ValueError):
    """Bad input of the user. The message says what is wrong, where, and how to fix it; the command exits with BAD_INPUT."""


class TrainingFailedError(RuntimeError):
    """Training that cannot continue. The last good checkpoint stays; the command logs the message and exits with FAILED."""


class DivergedError(TrainingFailedError):
    """Training in which too many updates in a row could not be made."""

    def __init__(self, message: str, step: int, reason: str) -> None:
        """step: the first of the updates that were skipped. reason: why the last one was."""
        super().__init__(message)
        self.step = step
        self.reason = reason


def problem_list(title: str, problems: Sequence[str]) -> InputError:
    """Return one error for several problems: a title, such as "2 problem(s) with the settings", and a line for each."""
    # A problem of several lines stays below its own bullet.
    listed = "\n".join(f"  - {problem}".replace("\n", "\n    ") for problem in problems)
    return InputError(f"{title}:\n{listed}")


def exit_code_of(error: BaseException) -> int:
    """Return BAD_INPUT if the user can fix the error (bad input, a file that cannot be read or written), else FAILED."""
    names_file = isinstance(error, OSError) and error.filename is not None
    code = BAD_INPUT if names_file or isinstance(error, InputError) else FAILED
    # A LostRankError has the exit code of the rank that failed first.
    return int(getattr(error, "exit_code", code))
