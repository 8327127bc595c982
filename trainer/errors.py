"""The exceptions that end a command with a message, and the exit codes of the commands."""

from __future__ import annotations

DONE = 0
FAILED = 1
BAD_INPUT = 2
PREEMPTED = 75
INTERRUPTED = 130


class InputError(ValueError):
    """Bad input: the message says what is wrong, where, and how to fix it. The command line prints it and exits with 2."""


class TrainingFailedError(RuntimeError):
    """Training can't go on; the last good checkpoint stays. The command line logs it and exits with 1."""


def exit_code_of(error: BaseException) -> int:
    """Return BAD_INPUT for what the user can fix (bad input, a file that can't be read or written), else FAILED."""
    names_file = isinstance(error, OSError) and error.filename is not None
    code = BAD_INPUT if names_file or isinstance(error, InputError) else FAILED
    return int(getattr(error, "exit_code", code))  # LostRankError has that of the rank that failed first
