"""Print for people: tables, progress bars, and text that cannot do harm.

Rich is imported when something is printed: ``--json`` does without.
Names and messages come out of repositories that others wrote. They are printed
literally, never as markup, and control characters are escaped.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.text import printable
from icechunk_async.cli.words import age_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from datetime import datetime

    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table
    from rich.text import Text

    from icechunk_async._runtime.progress import Progress, ProgressCallback

__all__ = [
    "ADDED",
    "BRANCH",
    "CHANGED",
    "QUIET",
    "REMOVED",
    "SNAPSHOT",
    "TAG",
    "assembled",
    "is_on_terminal",
    "make_console",
    "make_table",
    "one_line",
    "plain",
    "showing_progress",
    "styled",
    "time_head",
    "time_of",
]

SNAPSHOT: Final = "yellow"
BRANCH: Final = "green"
TAG: Final = "cyan"
QUIET: Final = "dim"
ADDED: Final = "green"
REMOVED: Final = "red"
CHANGED: Final = "yellow"

_WIDE = 10_000


@cache
def _console_type() -> type[Console]:
    from rich.console import Console  # noqa: PLC0415 -- slow to import

    class PipeConsole(Console):
        """Rich's console, but a broken pipe is left to the command, which ends otherwise."""

        def on_broken_pipe(self) -> None:
            """Raise the error again."""
            raise BrokenPipeError

    return PipeConsole


def make_console(*, stderr: bool = False) -> Console:
    """Return a console; if it is not a terminal, there are no colours and lines are not folded."""
    console = _console_type()(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


def is_on_terminal(console: Console) -> bool:
    """Return whether somebody looks at it. Colours can be forced into a pipe as well."""
    return console.is_terminal and console.file.isatty()


def plain(text: str, style: str = "") -> Text:
    """Return text without markup, with control characters escaped."""
    lines = map(printable, text.splitlines())
    return styled("\n".join(lines), style)


def styled(text: str, style: str = "") -> Text:
    """Return text with a style; unlike `plain`, control characters stay."""
    from rich.text import Text  # noqa: PLC0415 -- slow to import

    return Text(text, style)


def assembled(*parts: str | Text | tuple[str, str]) -> Text:
    """Return the parts, some with a style, as one text."""
    from rich.text import Text  # noqa: PLC0415 -- slow to import

    return Text.assemble(*parts)


def one_line(text: str) -> str:
    """Return text on one line, with control characters escaped."""
    return printable(" ".join(text.split()))


def make_table(*columns: str, header: bool = True) -> Table:
    """Return a table without frames."""
    from rich.table import Table  # noqa: PLC0415 -- slow to import

    table = Table(box=None, pad_edge=False, show_header=header, header_style="bold")
    for column in columns:
        # Parts of ids and times are useless, so only the long text at the end of a line folds.
        folds = column in {"MESSAGE", "REFS", ""}
        table.add_column(column, no_wrap=not folds, overflow="fold")
    return table


def time_of(moment: datetime, console: Console) -> Text:
    """Return how long ago a time was on a terminal; elsewhere the time in UTC, to the second.

    What reads a pipe gets the same text tomorrow. `time_head` is the head of the column.
    """
    on_terminal = is_on_terminal(console)
    return styled(age_of(moment) if on_terminal else f"{moment:%Y-%m-%d %H:%M:%S}", QUIET)


def time_head(name: str, console: Console) -> str:
    """Return the head of a column of times; see `time_of`."""
    return name if is_on_terminal(console) else f"{name} (UTC)"


@contextmanager
def showing_progress() -> Generator[ProgressCallback]:
    """Show a bar for each phase if standard error is a terminal, and remove them at the end.

    Yields:
        The callback to report progress to.
    """
    console = make_console(stderr=True)
    if not console.is_terminal:
        # Not bars that are disabled: those of older versions of Rich end with an empty line.
        yield lambda _: None
        return
    from rich.progress import (  # noqa: PLC0415  # slow to import
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as Bars  # noqa: PLC0415  # slow to import

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(progress: Progress) -> None:
            task = tasks.get(progress.phase)
            if task is None:
                task = tasks[progress.phase] = bars.add_task(progress.phase, total=None)
            bars.update(task, completed=progress.done, total=progress.total)

        yield show
