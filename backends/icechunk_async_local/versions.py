"""Versions of files: inode, time and size.

Rust's ``object_store`` builds the same tag for a local file. It is sound because a file is never
changed once it has its name, and because every file gets a distinct time before that.

The time is the disk's: garbage collection compares it with those of other writers' files, and a
process may have a wrong clock. On a local disk the kernel sets it, on a network file system the
server. It is refined to microseconds, because the kernel's own stamps repeat within a tick.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Final

from icechunk_async.storage import Version

__all__ = [
    "LAST_US",
    "any_below",
    "disk_time_us",
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


_TICK_US: Final = 10_000
"""The longest tick of a kernel: its stamps lag behind its clock by up to that much."""


class _Times:
    """Strictly increasing times of each device, for all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # By device: times are compared within one file system alone. Other processes count
        # separately; the inode tells their files apart.
        self._last_us: dict[int, int] = {}

    def next_us(self, device: int, near_us: int) -> int:
        with self._lock:
            chosen = max(near_us, self._last_us.get(device, 0) + 1)
            self._last_us[device] = chosen
            return chosen


_times: Final = _Times()


def any_below(limit: int) -> int:
    """Return a random integer from 0 to ``limit``, exclusive; at most 2**32.

    Not by `secrets`, which imports OpenSSL: that takes a moment, and every program opens files.
    """
    return int.from_bytes(os.urandom(8)) % limit


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
    # File systems with 64-bit times store years beyond 9999, and anyone may set them: one such file
    # must not end a listing.
    return _EPOCH + timedelta(microseconds=min(since_us, LAST_US))


def time_us(found: os.stat_result) -> int:
    """Return when the file was written, in microseconds since 1970; never less than 0."""
    # Before 1970 is possible as well, in files that were unpacked.
    return max(0, found.st_mtime_ns // 1000)


def next_time_us(written: os.stat_result, later_than: int = 0) -> int:
    """Return a distinct time for a file that was just written, by the clock of its disk.

    It is never before the disk's own stamp. Where this process's clock agrees with the disk's, it
    supplies the microseconds; otherwise they are random, so that two processes rarely choose the
    same. It may be up to two ticks in the disk's future, which only makes garbage wait.

    Args:
        written: the state of the file after its last write.
        later_than: microseconds since 1970; the answer is greater.
    """
    stamp_us = time_us(written)
    now_us = time.time_ns() // 1000
    # A stamp lags by up to a tick, and the reading of our clock comes a moment later: within two
    # ticks the clocks agree.
    if not stamp_us <= now_us <= stamp_us + 2 * _TICK_US:
        now_us = stamp_us + _TICK_US + any_below(_TICK_US)
    return max(_times.next_us(written.st_dev, now_us), later_than + 1)


def disk_time_us(folder: int) -> int:
    """Return the time by the clock of the disk, by setting that of an open folder to now.

    The kernel, or the server of a network file system, chooses what *now* is. Nothing depends on
    the time of a folder, and setting it needs no room.

    Raises:
        OSError: this user may not change the folder, or the file system is read-only.
    """
    os.utime(folder)
    return time_us(os.fstat(folder))
