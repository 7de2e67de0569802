"""Running what a command does: one event loop, errors to exit codes, the document to stdout."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from icechunk_async.cli.console import make_console, one_line
from icechunk_async.errors import IcechunkError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from rich.console import Console

__all__ = ["answer", "reporting", "to_json"]


def answer[D](
    work: Callable[[], Coroutine[Any, Any, D]],
    show: Callable[[D, Console], None],
    *,
    as_json: bool,
    debug: bool,
) -> D:
    """Do the work of a command, show its document and answer it.

    Args:
        work: answers the document; run in an event loop of its own.
        show: prints the document for people.
        as_json: print it as JSON instead.
        debug: print the traceback of an error.

    Raises:
        typer.Exit: with the exit code, where the command did not end well.
    """
    with reporting(debug=debug):
        document = asyncio.run(work())
        if as_json:
            typer.echo(to_json(document))
        else:
            show(document, make_console())
        sys.stdout.flush()
        return document


@contextmanager
def reporting(*, debug: bool) -> Generator[None]:
    """Turn what the block raises into one sentence and an exit code."""
    try:
        yield
    except IcechunkError as error:
        if debug:
            traceback.print_exc()
        else:
            _complain(error)
        raise typer.Exit(1) from None
    except BrokenPipeError:
        # The reader has enough. Nothing may be flushed into the pipe when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _complain(error: IcechunkError) -> None:
    sentence = Text.assemble(("Error", "bold red"), f" ({error.kind}): ", one_line(str(error)))
    make_console(stderr=True).print(sentence, soft_wrap=True)


def to_json(document: object) -> str:
    """Answer a document as JSON; times are ISO 8601."""
    plain: Any = asdict(document) if is_dataclass(document) else document  # type: ignore[arg-type]
    return json.dumps(plain, default=_encode, ensure_ascii=False, indent=2)


def _encode(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    raise TypeError(f"a document cannot hold a {type(value).__name__}")
