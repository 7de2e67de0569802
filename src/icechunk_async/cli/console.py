"""Print for people: tables, progress bars, and text that cannot do harm.

Rich is imported when it is needed: ``--json`` and simple tables in pipes do without.
Names and messages come out of repositories that others wrote. They are printed
literally, never as markup, and control characters are escaped.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from icechunk_async._runtime.text import printable
from icechunk_async.cli.listing import Listing, cell, escaped, is_simple, make_table
from icechunk_async.cli.words import age_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from datetime import datetime

    from rich.console import Console
    from rich.progress import TaskID
    from rich.text import Text

    from icechunk_async._runtime.progress import Progress, ProgressCallback
    from icechunk_async.cli.listing import Cell

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
    "time_cell",
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
_ASKED: Final = frozenset({"COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"})
"""Variables with which users say what Rich is to do in a pipe."""


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
    pipe = _Pipe(stderr=stderr)
    return cast("Console", pipe) if pipe.is_one() else _rich_console(stderr=stderr)


def _rich_console(*, stderr: bool) -> Console:
    console = _console_type()(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


class _Pipe:
    """The console of a pipe or a file: it prints simple lines and listings by itself.

    To import Rich takes as long as all else that a short command does. Everything else Rich prints.
    """

    is_terminal: Final = False

    def __init__(self, *, stderr: bool) -> None:
        self._stderr = stderr

    def is_one(self) -> bool:
        """Return whether it is a pipe or a file, and the environment does not say what to do."""
        return not (_ASKED.intersection(os.environ) or self.file.isatty())

    @property
    def file(self) -> TextIO:
        """The stream that is printed to."""
        return sys.stderr if self._stderr else sys.stdout

    @property
    def width(self) -> int:
        """Columns of what Rich prints."""
        return self._rich.width

    @width.setter
    def width(self, columns: int) -> None:
        self._rich.width = columns

    @cached_property
    def _rich(self) -> Console:
        return _rich_console(stderr=self._stderr)

    def print(self, *objects: object, **options: Any) -> None:
        """Print objects of Rich, text or a listing."""
        lines = _plain_lines(*objects) if len(objects) == 1 and not options else None
        if lines is None:
            self._rich.print(*objects, **options)
        else:
            self.file.write("".join(f"{line}\n" for line in lines))

    def __enter__(self) -> Console:
        """Begin to print many things at once, as bars of progress do."""
        return self._rich.__enter__()

    def __exit__(self, *error: object) -> None:
        """Print them."""
        self._rich.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of Rich's console."""
        return getattr(self._rich, name)


def _plain_lines(shown: object) -> list[str] | None:
    """Return the lines that Rich would print into a pipe; None if only it can tell."""
    if isinstance(shown, Listing):
        return shown.lines(_WIDE)
    return [shown] if isinstance(shown, str) and is_simple(shown) and len(shown) <= _WIDE else None


def is_on_terminal(console: Console) -> bool:
    """Return whether somebody looks at it. Colours can be forced into a pipe as well."""
    return console.is_terminal and console.file.isatty()


def plain(text: str, style: str = "") -> Text:
    """Return text without markup, with control characters escaped."""
    return styled(escaped(text), style)


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


def time_of(moment: datetime, console: Console) -> Text:
    """Return how long ago a time was on a terminal; elsewhere the time in UTC, to the second.

    What reads a pipe gets the same text tomorrow. `time_head` is the head of the column.
    """
    return styled(_shown(moment, console), QUIET)


def time_cell(moment: datetime, console: Console) -> Cell:
    """Return a time as a cell of a `Listing`; as `time_of`."""
    return cell(_shown(moment, console), QUIET)


def _shown(moment: datetime, console: Console) -> str:
    return age_of(moment) if is_on_terminal(console) else f"{moment:%Y-%m-%d %H:%M:%S}"


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
