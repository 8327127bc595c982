"""The exceptions that end a command with a message, and the exit codes of the commands."""

from __future__ import annotations

import errno

DONE, FAILED, BAD_INPUT, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


class InputError(ValueError):
    """Bad input: the message says what is wrong, where, and how to fix it. The command line prints it and exits with 2."""


class TrainingFailedError(RuntimeError):
    """Training can't go on; the last good checkpoint stays. The command line logs it and exits with 1."""


def exit_code_of(error: BaseException) -> int:
    """2 for what the user can put right: bad input, and a file that can't be read or written. 1 for the rest."""
    names_file = isinstance(error, OSError) and error.filename is not None
    return BAD_INPUT if names_file or isinstance(error, InputError) else FAILED


MACHINE_FAULTS = {
    errno.EMFILE: "allow more open files (`ulimit -n 4096`)",
    errno.ENFILE: "the machine has too many open files: raise fs.file-max, or end other programs",
    errno.ENOMEM: "the machine has no memory left: use fewer threads, or end other programs",
}


def refuse_machine_fault(error: OSError) -> None:
    """Raise InputError if `error` is the machine's fault: the file that was being read must not be blamed for it."""
    if advice := MACHINE_FAULTS.get(error.errno or 0):
        raise InputError(f"can't read {error.filename or 'a file'}: {error.strerror}: {advice}") from error
