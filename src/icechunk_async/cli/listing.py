"""Tables of commands that are run often, printed without Rich where nobody looks.

To import Rich takes as long as all else that such a command does. Into a pipe or a file it would
print the same lines, unless a text is of letters that are not one column wide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table
    from rich.text import Text

    type Cell = tuple[tuple[str, str], ...]
    """Texts and their styles, one after the other; without control characters but for newlines."""

__all__ = ["Listing", "cell", "escaped", "is_simple", "joined", "make_table", "text_of"]

_GAP: Final = "  "


def escaped(text: str) -> str:
    """Return text with control characters escaped, but for newlines."""
    return "\n".join(map(printable, text.splitlines()))


def is_simple(text: str) -> bool:
    """Return whether each letter of a line is one column wide; it has no newline."""
    return text.isascii() and text.isprintable()


def cell(text: str, style: str = "") -> Cell:
    """Return text with a style, with control characters escaped."""
    return ((escaped(text), style),)


def joined(between: str, cells: Iterable[Cell]) -> Cell:
    """Return cells as one, with a text between them."""
    found: list[tuple[str, str]] = []
    for it in cells:
        found += [(between, ""), *it] if found else it
    return tuple(found)


def text_of(parts: Cell) -> Text:
    """Return a cell as Rich has it."""
    from rich.text import Text  # noqa: PLC0415 -- slow to import

    return Text.assemble(*parts)


def make_table(*columns: str, header: bool = True) -> Table:
    """Return a table without frames."""
    from rich.table import Table  # noqa: PLC0415 -- slow to import

    table = Table(box=None, pad_edge=False, show_header=header, header_style="bold")
    for column in columns:
        # Parts of ids and times are useless, so only the long text at the end of a line folds.
        folds = column in {"MESSAGE", "REFS", ""}
        table.add_column(column, no_wrap=not folds, overflow="fold")
    return table


class Listing:
    """A table without frames, as `make_table` makes one."""

    def __init__(self, *columns: str, header: bool = True) -> None:
        """Begin without rows."""
        self._columns = columns
        self._header = header
        self._rows: list[tuple[Cell, ...]] = []

    def add_row(self, *cells: Cell) -> None:
        """Add a row with a cell for each column."""
        self._rows.append(cells)

    def __rich__(self) -> Table:
        """Return the table as Rich has it, which prints it."""
        table = make_table(*self._columns, header=self._header)
        for row in self._rows:
            table.add_row(*map(text_of, row))
        return table

    def lines(self, width: int) -> list[str] | None:
        """Return the lines that Rich would print without colours; None if only it can tell.

        Args:
            width: that of the output; wider tables are folded.
        """
        head = [[[it] for it in self._columns]] if self._header else []
        rows = [
            *head,
            *(["".join(text for text, _ in it).split("\n") for it in row] for row in self._rows),
        ]
        texts = [line for row in rows for lines in row for line in lines]
        if not rows or not all(map(is_simple, texts)):
            return None
        widths = [
            max(len(line) for lines in column for line in lines)
            for column in zip(*rows, strict=True)
        ]
        if sum(widths) + len(_GAP) * (len(widths) - 1) > width:
            return None
        return [
            _GAP.join(
                (lines[place] if place < len(lines) else "").ljust(size)
                for lines, size in zip(row, widths, strict=True)
            )
            for row in rows
            for place in range(max(map(len, row)))
        ]
