"""Talk to people: tables, progress bars, times in words, questions, and text that cannot do harm.

To import Rich takes as long as all else that a short command does. Commands that are run often
print a `Listing`, for which a pipe or a file needs no Rich: it gets the lines that Rich would
print. ``--json`` does without as well.

Names and messages come out of repositories that others wrote. They are printed literally, never as
markup, and control characters are escaped.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

import typer

from icechunk_async._runtime import clock
from icechunk_async._runtime.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table
    from rich.text import Text

    from icechunk_async._runtime.progress import Progress, ProgressCallback

    type Cell = tuple[tuple[str, str], ...]
    """Texts and their styles, one after the other; without control characters but for newlines."""

__all__ = [
    "ADDED",
    "BRANCH",
    "CHANGED",
    "QUIET",
    "REMOVED",
    "SNAPSHOT",
    "TAG",
    "Listing",
    "age",
    "age_of",
    "ask",
    "assembled",
    "cell",
    "escaped",
    "is_answered",
    "is_on_terminal",
    "is_simple",
    "is_young",
    "joined",
    "json_text",
    "make_console",
    "make_table",
    "moment",
    "one_line",
    "plain",
    "print_json",
    "showing_progress",
    "styled",
    "text_of",
    "time_cell",
    "time_head",
    "time_of",
    "warn",
]


_UNITS: Final = (
    ("year", timedelta(days=365)),
    ("day", timedelta(days=1)),
    ("hour", timedelta(hours=1)),
    ("minute", timedelta(minutes=1)),
    ("second", timedelta(seconds=1)),
)

_YOUNG: Final = timedelta(hours=1)
_GAP: Final = "  "
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

    # Rich's own method prints nothing and exits with 1: `icechunk-async log | head` would fail.
    class PipeConsole(Console):
        """Rich's console, but a broken pipe is left to the command, which ends otherwise."""

        def on_broken_pipe(self) -> None:
            """Raise the error again."""
            raise BrokenPipeError

    return PipeConsole


def make_console(*, stderr: bool = False) -> Console:
    """Return a console; if it is not a terminal, there are no colours and lines are not folded."""
    pipe = _Pipe(stderr=stderr)
    # It has all that is used of a console; what is rare comes from Rich by `__getattr__`.
    return cast("Console", pipe) if pipe.is_one() else _rich_console(stderr=stderr)


def _rich_console(*, stderr: bool) -> Console:
    console = _console_type()(stderr=stderr, highlight=False, markup=False, emoji=False)
    # Rich would fold lines at 80 columns, and what reads a pipe expects a line for each row.
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
        # With options, such as a style or an end, only Rich knows what is printed.
        lines = _plain_lines(*objects) if len(objects) == 1 and not options else None
        if lines is None:
            self._rich.print(*objects, **options)
        else:
            self.file.write("".join(f"{line}\n" for line in lines))

    def __enter__(self) -> Console:
        """Begin to print many things at once, as bars of progress do."""
        # Looked up on the class by `with`, so that `__getattr__` does not help.
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
    # Rich takes FORCE_COLOR for a terminal; a pager and ages in words need a real one.
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
    # Newlines become spaces: a message must not pass for a second line of output.
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
    # Not an age in a pipe: what compares two outputs would find another one each second.
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


def escaped(text: str) -> str:
    """Return text with control characters escaped, but for newlines."""
    return "\n".join(map(printable, text.splitlines()))


def json_text(
    value: object, *, indent: int | None = 2, default: Callable[[Any], object] | None = None
) -> str:
    """Return a value as JSON that a terminal shows literally; arguments as of `json.dumps`."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=default)
    if text.replace("\n", "").isprintable():
        return text
    # Else DEL, control characters beyond ASCII and marks of direction would stay: JSON allows them.
    return json.dumps(value, indent=indent, default=default)


def print_json(value: object, console: Console) -> None:
    """Print a value as JSON, with colours on a terminal."""
    text = json_text(value)
    # Rich reads the text and writes it anew: what is escaped in it must be escaped again.
    console.print_json(text, ensure_ascii=text.isascii())


def is_simple(text: str) -> bool:
    """Return whether each letter of a line is one column wide; it has no newline."""
    # Letters beyond ASCII may be two columns wide or none, which Rich's tables know.
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
        # Of `sql`, columns are named by dimensions and attributes, which others named.
        table.add_column(printable(column), no_wrap=not folds, overflow="fold")
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
        # A table without a letter has columns of Rich's making.
        if not any(widths) or sum(widths) + len(_GAP) * (len(widths) - 1) > width:
            return None
        return [
            _GAP.join(
                (lines[place] if place < len(lines) else "").ljust(size)
                for lines, size in zip(row, widths, strict=True)
            )
            for row in rows
            for place in range(max(map(len, row)))
        ]


def age(span: timedelta) -> str:
    """Return a span of time in words, in the largest unit of which there are two."""
    for name, unit in _UNITS:
        count = span // unit
        # 90 minutes stay "90 minutes" and 120 are "2 hours": a rounded "1 hour" would say less.
        if count >= 2:
            return f"{count:,} {name}s"
    return "1 second" if span >= timedelta(seconds=1) else "less than a second"


def age_of(time: datetime) -> str:
    """Return how long ago a time was, in words."""
    span = _span_since(time)
    return f"{age(-span)} from now" if span < timedelta() else f"{age(span)} ago"


def moment(time: datetime) -> str:
    """Return a time to the second, and in words how long ago it was."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({age_of(time)})"


def is_young(time: datetime) -> bool:
    """Return whether a time is less than an hour ago: sessions that began before may be open."""
    return _span_since(time) < _YOUNG


def is_to_come(time: datetime) -> bool:
    """Return whether a time is in the future."""
    return _span_since(time) < timedelta()


def _span_since(time: datetime) -> timedelta:
    return clock.from_us(clock.now_us()) - time


def is_answered() -> bool:
    """Return whether somebody sits at a terminal who can answer a question."""
    # Both: the question is printed on standard error, and standard output may be a pipe meanwhile.
    return sys.stdin.isatty() and sys.stderr.isatty()


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    typer.secho(f"Warning: {sentence}", err=True, fg="yellow" if sys.stderr.isatty() else None)


def ask(question: str) -> None:
    """Ask on standard error whether to continue.

    Raises:
        typer.Exit: with 1 if the answer is no, which is the default.
        typer.Abort: there was no answer.
    """
    # On standard error: standard output is the document, which may go elsewhere.
    if not typer.confirm(printable(question), default=False, err=True):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)
