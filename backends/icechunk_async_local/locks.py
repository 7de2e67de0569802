"""The kernel's lock on a directory: atomic steps between threads and processes.

The lock belongs to an open descriptor. The kernel drops it with the process, so a writer that is
killed leaves nothing behind that others would wait for.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import StorageUnavailableError

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["locked", "try_lock", "unlock"]

_FIRST_PAUSE_SECONDS: Final = 50e-6
_LONGEST_PAUSE_SECONDS: Final = 0.01


def try_lock(directory: int, *, exclusive: bool) -> bool:
    """Lock an open directory if that needs no waiting.

    Raises:
        OSError: there are no locks here.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    try:
        fcntl.flock(directory, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(directory: int) -> None:
    """Let others have the lock.

    Closing the descriptor would not do: a child process that was forked in this moment has a
    copy of it until it starts its own program.
    """
    if sys.platform != "win32":
        fcntl.flock(directory, fcntl.LOCK_UN)


@contextmanager
def locked(
    directory: int, path: Callable[[], str], *, exclusive: bool, timeout_seconds: float
) -> Generator[None]:
    """Hold the lock of an open directory; those who share it keep out only who wants it alone.

    Args:
        directory: an open directory.
        path: answers where it is, for a message.
        exclusive: keep out all others.
        timeout_seconds: how long to wait for them.

    Raises:
        StorageUnavailableError: others held it all the time.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while not try_lock(directory, exclusive=exclusive):
        if time.monotonic() >= deadline:
            raise StorageUnavailableError(
                f"Another writer has held the lock on {path()!r} for {timeout_seconds:g} s"
                f"{_holders(directory)}. Look for a stopped or hanging process, end it (that "
                "frees the lock), then try again.",
                path=path(),
            )
        # Jitter, so that writers who collided do not collide again.
        time.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
    try:
        yield
    finally:
        unlock(directory)


def _holders(directory: int) -> str:
    """Name the processes that hold the lock, where the system tells."""
    inode = os.fstat(directory).st_ino
    try:
        table = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    lines = [line.split() for line in table.splitlines()]
    found = {
        fields[4]
        for fields in lines
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode)
    }
    return f" (process {', '.join(sorted(found))})" if found else ""
