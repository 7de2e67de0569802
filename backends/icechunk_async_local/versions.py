"""Versions of files: inode, time and size.

Rust's ``object_store`` builds the same tag for a local file. It is sound because a file is never
changed once it has its name, and because every file gets a distinct time before that.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from icechunk_async.storage import Version

if TYPE_CHECKING:
    import os

__all__ = [
    "LAST_US",
    "modified_at",
    "modified_at_us",
    "next_time_us",
    "time_us",
    "version_from",
    "version_of",
]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LAST_US: Final = (datetime(9999, 12, 31, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""The latest time that `datetime` can express."""


class _Times:
    """Strictly increasing times for all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._last_us = 0

    def next_us(self) -> int:
        now_us = time.time_ns() // 1000
        with self._lock:
            self._last_us = max(now_us, self._last_us + 1)
            return self._last_us


_times: Final = _Times()


def version_of(found: os.stat_result) -> Version:
    """Return the version of a file in state ``found``."""
    return version_from(found.st_ino, time_us(found), found.st_size)


def version_from(inode: int, modified_us: int, size_bytes: int) -> Version:
    """Return the version of a file with these properties."""
    return Version(f"{inode:x}-{modified_us:x}-{size_bytes:x}")


def modified_at(found: os.stat_result) -> datetime:
    """Return when the file was written."""
    return modified_at_us(time_us(found))


def modified_at_us(since_us: int) -> datetime:
    """Return the time of this number of microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=min(since_us, LAST_US))


def time_us(found: os.stat_result) -> int:
    """Return when the file was written, in microseconds since 1970; never less than 0."""
    return max(0, found.st_mtime_ns // 1000)


def next_time_us(later_than: int = 0) -> int:
    """Return a time for a new file: now, or slightly later if that was already used.

    Args:
        later_than: microseconds since 1970; the answer is greater.
    """
    return max(_times.next_us(), later_than + 1)
