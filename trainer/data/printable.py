"""Text for messages: names of files, which may hold any byte but a slash and a zero, and sizes."""


def printable(text: str) -> str:
    """`text` with what would move a cursor, break a line or fail to encode (line ends, ANSI escapes, bytes that are no UTF-8,
    marks that turn the direction of writing) shown as Python writes it: a line end as \\n, an escape as \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size_text(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB where it is small."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes > 0.1 * 2**30 else f"{num_bytes / 2**20:.2f} MiB"
