"""The console that commands print to, and text that is safe to print."""

from __future__ import annotations

import os

from rich.console import Console
from rich.text import Text

__all__ = ["make_console", "one_line", "plain"]

_WIDE = 10_000


class _PipeConsole(Console):
    """Rich's console, but a broken pipe is left to the command instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command."""
        raise BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """Answer a console for people; what is not a terminal gets no colours and no folded lines."""
    console = _PipeConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


def plain(text: str, style: str = "") -> Text:
    """Answer text as it is: no markup in it counts, and control characters show as escapes."""
    lines = (_escape(line) for line in text.splitlines())
    return Text("\n".join(lines), style=style)


def one_line(text: str) -> str:
    """Answer text on one line, control characters as escapes."""
    return _escape(" ".join(text.split()))


def _escape(line: str) -> str:
    return "".join(it if it.isprintable() else repr(it)[1:-1] for it in line)
