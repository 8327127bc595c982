"""The exceptions that end a command with a message, and the exit codes of the commands."""

DONE, FAILED, BAD_INPUT, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


class InputError(ValueError):
    """Bad input: the message says what is wrong, where, and how to fix it. The command line prints it and exits with 2."""


class TrainingFailedError(RuntimeError):
    """Training can't go on; the last good checkpoint stays. The command line logs it and exits with 1."""
