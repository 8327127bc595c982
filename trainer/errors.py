"""The one exception for what the user can put right, and the exit codes of the commands."""

DONE, FAILED, BAD_INPUT, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


class InputError(ValueError):
    """Bad input: the message says what is wrong, where, and how to fix it. The command line prints it and exits with 2."""
