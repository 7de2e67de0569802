"""The arguments that commands share, and how their text is read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "AsOf",
    "Debug",
    "OptionPair",
    "Options",
    "Ref",
    "Url",
    "parse_pair",
    "parse_time",
]

type OptionPair = tuple[str, object]


def parse_pair(text: str) -> OptionPair:
    """Read ``key=value``; a value that is JSON is that, any other is a string.

    So ``true``, ``3``, ``2.5`` and ``null`` are not strings, and ``"3"`` in quotes is one.

    Raises:
        typer.BadParameter: there is no ``=``, or nothing before it.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise typer.BadParameter(f"{text!r} is not of the form key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parse_time(text: str) -> datetime:
    """Read an ISO 8601 time; without an offset it is UTC.

    Raises:
        typer.BadParameter: it is none.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no ISO 8601 time such as 2026-01-31 or 2026-01-31T12:00:00+01:00"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


Url = Annotated[str, typer.Argument(metavar="URL", help="Path or URL of the repository.")]
Ref = Annotated[str, typer.Argument(metavar="REF", help="A branch, a tag or a snapshot id.")]
AsOf = Annotated[
    datetime | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        parser=parse_time,
        help="With a branch: what was its tip at this ISO 8601 time (UTC unless it says so).",
    ),
]
Options = Annotated[
    list[OptionPair] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        parser=parse_pair,
        help="An option of the storage backend, such as durability=none. May be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
