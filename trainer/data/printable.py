"""Text for messages: sizes, and file names, which may contain any byte except a slash and a zero byte."""


def printable(text: str) -> str:
    """Escape, as Python does, all characters that could affect a terminal or cannot be encoded.

    For example, a line end becomes \\n and an ANSI escape \\x1b. Bytes that are not UTF-8 and marks that change the writing
    direction are escaped as well.
    """
    if text.isprintable():
        return text
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def size_text(num_bytes: float) -> str:
    """Format a number of bytes in GiB, or in MiB if it is small."""
    if num_bytes > 0.1 * 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"
