"""The standard streams of the process: they may be closed, full, or read by nobody."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["drop_output", "open_what_is_closed", "reporting_output"]


def open_what_is_closed() -> None:
    """Give streams to a process that was started without them, who wants the work and no output."""
    # Python sets them to None then, and the work would end where it looks for a terminal.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 -- to the end


@contextmanager
def reporting_output() -> Generator[None]:
    """Turn an error of the output into one sentence and an exit code.

    Commands report theirs themselves. This is for what is printed around them, such as help.
    """
    try:
        try:
            yield
        finally:
            # As the interpreter ends, an error of the last write would be one without a sentence.
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough
        drop_output()
        raise SystemExit(0) from None
    except OSError as error:
        if "--debug" in sys.argv:
            raise
        drop_output()
        with suppress(OSError):
            sys.stderr.write(f"Error: {error}. --debug shows where it happened.\n")
        raise SystemExit(1) from None


def drop_output() -> None:
    """Let nothing be flushed to where it cannot go when the process ends."""
    # What is in the buffer of `sys.stdout` is flushed when the interpreter ends, fails there again,
    # and Python then prints a message and exits with 120.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
