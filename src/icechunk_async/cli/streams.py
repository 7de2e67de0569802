"""Standard output that cannot be written: the disk is full, or nobody reads the pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

__all__ = ["drop_output", "end_with"]


def end_with(error: OSError) -> NoReturn:
    """Turn an error of the output into one sentence and an exit code.

    Commands report theirs themselves. This is for what is printed around them, such as help.
    """
    if isinstance(error, BrokenPipeError):  # the reader has enough
        drop_output()
        raise SystemExit(0) from None
    if "--debug" in sys.argv:
        raise error
    drop_output()
    with suppress(OSError):
        sys.stderr.write(f"Error: {error}. --debug shows where it happened.\n")
    raise SystemExit(1) from None


def drop_output() -> None:
    """Let nothing be flushed to where it cannot go when the process ends."""
    # What is in the buffer of `sys.stdout` is flushed when the interpreter ends, fails there again,
    # and Python then prints a message and exits with 120.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
