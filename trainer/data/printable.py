"""Names of files as one line of text: they come from whoever made the set, and may hold any byte but a slash and a zero."""


def printable(text: str) -> str:
    """`text` with what would move a cursor, break a line or fail to encode (line ends, ANSI escapes, bytes that are no UTF-8,
    marks that turn the direction of writing) shown as Python writes it: a line end as \\n, an escape as \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
