"""The one exception for what the user can put right."""


class InputError(ValueError):
    """Bad input: the message says what is wrong, where, and how to fix it. The command line prints it and exits with 2."""
