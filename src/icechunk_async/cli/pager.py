"""Show long output a screen at a time, as `git log` does."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from icechunk_async.cli.console import is_on_terminal

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

__all__ = ["paged"]


@contextmanager
def paged(console: Console) -> Generator[None]:
    """Show what the block prints in the user's pager if it is longer than the terminal is high.

    In pipes and files nothing is different. ``PAGER`` names the pager; by default it is less, and
    ``cat`` pages nothing. Without a pager everything is printed.
    """
    # A pager reads keys from the terminal; with standard input elsewhere it would stop for ever.
    if not (is_on_terminal(console) and sys.stdin.isatty()):
        yield
        return
    with console.capture() as captured:
        yield
    text = captured.get()
    if text.count("\n") < console.height or not _shown_in_pager(text):
        console.file.write(text)
        console.file.flush()


def _shown_in_pager(text: str) -> bool:
    """Return whether there was a pager to show the text."""
    # Words, since PAGER="less -S" is a command with an option. No shell reads it.
    command = shlex.split(os.environ.get("PAGER", "")) or ["less"]
    # Show colours; if all fits, end at once.
    environment = {"LESS": "FRX", **os.environ}
    try:
        pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)  # noqa: S603 -- the user's own
    except OSError:
        return False
    assert pager.stdin is not None
    # Ctrl-C is for the pager, which stays.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pager.stdin as stdin:
            stdin.write(text.encode())
    except BrokenPipeError:
        pass  # the reader has enough
    finally:
        # Until the reader leaves it: else the shell's prompt and the pager share the terminal.
        pager.wait()
        signal.signal(signal.SIGINT, before)
    return True
