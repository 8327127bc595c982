"""Text for messages: file names, which may hold any byte except a slash and a zero, and sizes."""


def printable(text: str) -> str:
    """Escape what could change a terminal or fail to encode, as Python writes it: a line end as \\n, ANSI escapes as \\x1b,
    also bytes that are not UTF-8 and marks that change the direction of writing."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size_text(num_bytes: float) -> str:
    """Format a number of bytes in GiB, or in MiB if it is small."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes > 0.1 * 2**30 else f"{num_bytes / 2**20:.2f} MiB"
