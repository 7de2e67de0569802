"""Text of others on a terminal: names and messages that came out of a repository."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, *, keep: str = "") -> str:
    """Return text with every character escaped that could move a cursor or reorder what is shown.

    Args:
        text: any text, also with lone surrogates.
        keep: characters to leave unchanged, such as the end of a line.
    """
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() or it in keep else repr(it)[1:-1] for it in text)
