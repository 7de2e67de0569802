"""Ages and times in words, and questions before what cannot be undone."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Final

import typer

from icechunk_async._runtime import clock
from icechunk_async._runtime.text import printable

__all__ = ["age", "age_of", "ask", "is_answered", "is_young", "moment", "warn"]

_UNITS: Final = (
    ("year", timedelta(days=365)),
    ("day", timedelta(days=1)),
    ("hour", timedelta(hours=1)),
    ("minute", timedelta(minutes=1)),
    ("second", timedelta(seconds=1)),
)
_YOUNG: Final = timedelta(hours=1)


def age(span: timedelta) -> str:
    """Return a span of time in words, in the largest unit of which there are two."""
    for name, unit in _UNITS:
        count = span // unit
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
    if not typer.confirm(printable(question), default=False, err=True):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)
