"""Queues of the writers of one machine, kept by the kernel: nothing is written for them.

A writer locks one byte of an open folder, shared: the byte whose position is the time of its
arrival. Such locks keep nobody out. But the kernel tells at once whether somebody else holds one
before a position, and drops the locks of a process that ends in any way. So the locks form a line,
in which each writer knows whether it is the first.

A process that was stopped keeps its lock. It is overlooked after some time; see `WriterNumber`.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Final

if sys.platform == "linux":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Number", "WriterQueue", "queue_of_machine"]

_FLOCK: Final = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, origin, start, length, process."""
_TIME_BITS: Final = 44
"""Microseconds of half a year. When they begin anew, somebody may be let in before others."""
# Together with the bits of the time these are 62: positions of locks are signed 64-bit numbers.
_LINE_BITS: Final = 18
_MOST_AHEAD: Final = 64


class WriterQueue:
    """The queues of one folder. Usable from any thread; nothing here blocks."""

    def __init__(self, open_folder: Callable[[], int | None]) -> None:
        """Queue at a folder, if the system has what it takes.

        Args:
            open_folder: opens the folder for reading, without waiting, and returns its descriptor;
                None if that is not possible.
        """
        self._open_folder = open_folder
        self._overlooked: set[int] = set()
        self._lock = threading.Lock()

    def take(self, line: str) -> Number | None:
        """Return a number; None where writers cannot queue."""
        # The layout of the structure above is that of 64-bit systems.
        if sys.platform != "linux" or struct.calcsize("P") != 8:
            return None
        fd = self._open_folder()
        if fd is None:
            return None
        first = (zlib.crc32(line.encode()) & ((1 << _LINE_BITS) - 1)) << _TIME_BITS
        # The same for all processes of the machine, and set by nobody. Two writers of one
        # microsecond share a byte, and neither waits for the other: the conditional write decides.
        since_us = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        position = first + since_us % (1 << _TIME_BITS)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _packed(fcntl.F_RDLCK, position, position + 1))
        except OSError:  # out of locks, or a file system without them
            os.close(fd)
            return None
        return Number(self, fd, first, position)

    def overlook(self, position: int) -> None:
        """No longer wait for a position."""
        with self._lock:
            self._overlooked |= {position}

    def without_overlooked(self, held: list[int], first: int, stop: int) -> list[int]:
        """Return positions that are waited for, in order, of all that are held in a range."""
        with self._lock:
            # Positions of this line that nobody holds are forgotten, or the set would grow for
            # ever.
            self._overlooked = {
                it for it in self._overlooked if it in held or not first <= it < stop
            }
            return sorted(set(held) - self._overlooked)


_MACHINE_FOLDER: Final = "/dev/shm"  # noqa: S108 -- nothing is written there
"""A folder that all processes of a machine can open, and that no network is in between."""


def _open_machine_folder() -> int | None:
    try:
        return os.open(_MACHINE_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None


queue_of_machine: Final = WriterQueue(_open_machine_folder)
"""For writers of one machine to a storage elsewhere, which those of other machines do not see."""


class Number:
    """The place of one writer in a queue; see `WriterNumber`."""

    def __init__(self, queue: WriterQueue, fd: int, first: int, position: int) -> None:
        """Hold the lock of a position; use `WriterQueue.take`."""
        self._queue = queue
        self._fd: int | None = fd
        self._first = first
        self._position = position

    def ahead(self) -> list[int]:
        """Return the positions of those who came earlier, in order. Two system calls for each."""
        # The kernel tells one lock of a range, any of them, so what is left and right of it is
        # asked for as well.
        held: list[int] = []
        ranges = [(self._first, self._position)]
        while ranges:
            start, stop = ranges.pop()
            found = self._held_in(start, stop)
            if found is not None:
                held.append(found)
                # The left part is looked at next, so that the first is found whatever the limit.
                ranges = [] if len(held) > _MOST_AHEAD else [*ranges, (found + 1, stop)]
                ranges.append((start, found))
        return self._queue.without_overlooked(held, self._first, self._position)

    def overlook(self, number: int) -> None:
        """No longer wait for somebody."""
        self._queue.overlook(number)

    def give_back(self) -> None:
        """Release the lock."""
        fd, self._fd = self._fd, None
        if fd is None or sys.platform != "linux":
            return
        try:
            # A child process that was forked meanwhile has a copy of the descriptor.
            position = self._position
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _packed(fcntl.F_UNLCK, position, position + 1))
        finally:
            os.close(fd)

    def _held_in(self, start: int, stop: int) -> int | None:
        """Return a position in a range that somebody else holds."""
        if self._fd is None or start >= stop or sys.platform != "linux":
            return None
        reply = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _packed(fcntl.F_WRLCK, start, stop))
        # A lock that excludes all others is asked for, so any shared one is reported. Those of this
        # descriptor are not: a writer never waits for itself.
        kind, _, found, _, _ = _FLOCK.unpack(reply)
        return None if kind == fcntl.F_UNLCK else found


def _packed(kind: int, start: int, stop: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, stop - start, 0)
