"""Reads that never block: bytes that the kernel has in memory, or nothing.

An event loop may read bytes that are in memory, which takes less time than a hop to a thread. It
must not wait for a disk: not to find a file (``openat2`` with ``RESOLVE_CACHED``), not for what is
known of it (``statx`` with ``AT_STATX_DONT_SYNC``), and not for its bytes (``preadv2`` with
``RWF_NOWAIT``). If a call would block or is unsupported, nothing is read and a worker thread does
it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import sys
from errno import EINVAL, ELOOP, ENOSYS, EOPNOTSUPP, EPERM
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.storage import Retrieved, slice_range
from icechunk_async_local.failures import missing
from icechunk_async_local.filesystems import opens_without_requests
from icechunk_async_local.memory import fresh_memory
from icechunk_async_local.versions import modified_at_us, version_from

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.storage import RangeRequest, Version
    from icechunk_async_local.paths import Place

__all__ = ["MOST_BYTES", "ReadsAtOnce"]

MOST_BYTES: Final = 2 << 20
"""Longer reads go to a thread: copying them takes longer than the hop."""

_PAGE_BYTES: Final = 4096
_MAPPED_BYTES: Final = 1 << 17
"""From this size on the allocator may map new pages."""

_OPENAT2: Final = 437  # on all of these
_MACHINES: Final = frozenset({"x86_64", "aarch64", "ppc64le", "s390x", "riscv64"})
_AT_FDCWD: Final = -100
_RESOLVE_NO_XDEV: Final = 0x01
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_CACHED: Final = 0x20
_AT_STATX_DONT_SYNC_AT_EMPTY_PATH: Final = 0x4000 | 0x1000
_STATX_BASIC: Final = 0x7FF
_NOWAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
_NEVER: Final = frozenset({ENOSYS, EPERM, EINVAL, ELOOP, EOPNOTSUPP})
"""Errors that will repeat: an old kernel, a sandbox, a link on the way to the root, another file
system further down."""


class _How(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


class _State(ctypes.Structure):
    """``struct statx``, which is the same on every machine."""

    # The fields in between are never read, so they are kept as bytes; the sizes are the ABI's.
    _fields_ = (
        ("head", ctypes.c_uint8 * 28),
        ("mode", ctypes.c_uint16),
        ("inode", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("times", ctypes.c_uint8 * 64),
        ("modified_seconds", ctypes.c_int64),
        ("modified_ns", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 132),
    )


class _Calls:
    """The system calls through `ctypes`; created once."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # By number: most C libraries in use have no function for it. Without the types ctypes
        # would pass 32-bit integers to a function of variable arguments.
        self._openat2: Any = libc.syscall
        self._openat2.restype = ctypes.c_long
        self._openat2.argtypes = (
            *(ctypes.c_long, ctypes.c_int, ctypes.c_char_p),
            *(ctypes.c_void_p, ctypes.c_size_t),
        )
        self._statx: Any = libc.statx
        self._statx.argtypes = (
            *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
            *(ctypes.c_uint, ctypes.c_void_p),
        )
        # The kernel only reads the structure, so that one serves all threads.
        # Without O_NONBLOCK a pipe in the place of an object would hold up the event loop until
        # somebody writes to it.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        here = _RESOLVE_CACHED | _RESOLVE_NO_SYMLINKS
        self._how = _How(flags, 0, here)
        self._how_below = _How(flags, 0, here | _RESOLVE_NO_XDEV)
        self._how_root = _How(os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_CACHED)

    def open(self, path: bytes) -> int:
        """Open a file if its path is cached in the kernel; return its descriptor.

        Raises:
            OSError: it is not cached, or does not exist.
        """
        return self._open(_AT_FDCWD, path, self._how)

    def open_below(self, root: bytes, path: bytes) -> int:
        """Open a file below a directory, in the same file system; as `open`.

        Links may lead to the directory, but not further.
        """
        directory = self._open(_AT_FDCWD, root, self._how_root)
        try:
            return self._open(directory, path, self._how_below)
        finally:
            os.close(directory)

    def _open(self, directory: int, path: bytes, how: _How) -> int:
        size = ctypes.sizeof(_How)
        fd: int = self._openat2(_OPENAT2, directory, path, ctypes.addressof(how), size)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "openat2 failed")
        return fd

    def state(self, fd: int) -> _State:
        """Return the cached state of an open file."""
        found = _State()
        flags = _AT_STATX_DONT_SYNC_AT_EMPTY_PATH
        if self._statx(fd, b"", flags, _STATX_BASIC, ctypes.byref(found)) != 0:
            raise OSError(ctypes.get_errno(), "statx failed")
        return found


def _find_calls() -> _Calls | None:
    if sys.platform != "linux" or not _NOWAIT or platform.machine() not in _MACHINES:
        return None
    try:
        return _Calls()
    except AttributeError:  # a C library without statx
        return None


_calls: Final = _find_calls()


class ReadsAtOnce:
    """Non-blocking reads below a directory. Thread-safe."""

    def __init__(self, root: Path, *, follow_links: bool = False) -> None:
        """Read below an absolute path. May block, to identify the file system.

        Args:
            root: the directory.
            follow_links: files may be behind links, or in other file systems. Threads read those,
                and only those.
        """
        self._below = os.fsencode(root).rstrip(b"/") + b"/"
        self._mixed = follow_links
        self._never = _NEVER - {ELOOP} if follow_links else _NEVER
        self._calls = _calls if opens_without_requests(root) else None

    @property
    def active(self) -> bool:
        """Whether reads at once may work here; False once they were found not to."""
        return self._calls is not None

    def _open(self, calls: _Calls, path: bytes) -> int:
        if self._mixed:
            return calls.open_below(self._below, path)
        return calls.open(self._below + path)

    def open_root(self) -> int | None:
        """Open the directory; return its descriptor, or None if a thread must try."""
        calls = self._calls
        if calls is None:
            return None
        try:
            return calls.open(self._below)
        except OSError as error:
            self._learn(error)
            return None

    def read_bytes(self, key: str, start: int, stop: int) -> memoryview | None:
        """Return bytes ``[start, stop)`` of a file, or None as `read`; the key is checked.

        Something that is no file cannot be read at a position, so its kind is not checked.
        """
        # Taken once: another thread may find out meanwhile that the calls never work here.
        calls = self._calls
        if calls is None or stop - start > MOST_BYTES:
            return None
        try:
            fd = self._open(calls, key.encode())
            try:
                return _read_all(fd, start, stop)
            finally:
                os.close(fd)
        except OSError as error:
            # A missing file as well: the next way of reading makes the error, which names the key.
            self._learn(error)
            return None

    def _path(self, place: Place) -> bytes:
        return b"/".join((*place.folders, place.name))

    def _learn(self, error: OSError) -> None:
        # Not EAGAIN, which says that the file is not in memory now: most reads of large data miss
        # once.
        if error.errno in self._never:
            self._calls = None

    def is_at(self, place: Place, version: Version) -> bool:
        """Return whether a file is known to be at a version; after False a thread must check."""
        calls = self._calls
        if calls is None:
            return False
        try:
            fd = self._open(calls, self._path(place))
            try:
                found = calls.state(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self._learn(error)
            return False
        # The version holds the inode, so that a file put in its place is another one, however
        # alike.
        return stat.S_ISREG(found.mode) and _version(found) == version

    def read(self, place: Place, byte_range: RangeRequest) -> Retrieved | None:
        """Return a file or part of it; None if a thread must try.

        Raises:
            ObjectNotFoundError: the kernel knows that it does not exist. Other errors are left to
                the thread.
        """
        calls = self._calls
        if calls is None:
            return None
        try:
            fd = self._open(calls, self._path(place))
            try:
                return _read(calls, fd, byte_range)
            finally:
                os.close(fd)
        except FileNotFoundError as error:
            # The kernel keeps what it knows of names, also that one does not exist. Were that not
            # in memory, the call would have declined with EAGAIN.
            raise missing(place.key) from error
        except OSError as error:  # it is not in memory, as a rule
            self._learn(error)
            return None


def _read(calls: _Calls, fd: int, byte_range: RangeRequest) -> Retrieved | None:
    found = calls.state(fd)
    # The descriptor holds on to one file, which is never changed once it has its name: size,
    # version and bytes below belong together although they are read one after the other.
    size: int = found.size
    start, stop = slice_range(byte_range, size)
    if stop - start > MOST_BYTES or not stat.S_ISREG(found.mode):
        return None
    data = _read_all(fd, start, stop)
    if data is None:  # it was cut off
        return None
    return Retrieved(data, _version(found), size, modified_at_us(_time_us(found)))


def _version(found: _State) -> Version:
    return version_from(found.inode, _time_us(found), found.size)


def _time_us(found: _State) -> int:
    since_us: int = found.modified_seconds * 1_000_000 + found.modified_ns // 1000
    return max(0, since_us)


def _read_all(fd: int, start: int, stop: int) -> memoryview | None:
    """Return bytes of an open file; None if it ends before.

    Raises:
        OSError: usually, they are not in memory.
    """
    length = stop - start
    view = _memory(length)
    count = have = os.preadv(fd, (view,), start, _NOWAIT) if length else 0
    while have < length and count:  # a page that is busy for a moment ends a read early
        count = os.preadv(fd, (view[have:],), start + have, _NOWAIT)
        have += count
    return view.toreadonly() if have == length else None


def _memory(length: int) -> memoryview:
    """Return memory to read into, aligned to a page if it is large.

    Memory from the allocator starts 16 bytes into a page. Some processors take more than twice as
    long to copy there from the system's cache, whose pages are aligned.
    """
    if length < _MAPPED_BYTES:
        return fresh_memory(length)
    import numpy as np  # noqa: PLC0415 -- small files are read without it

    fresh = np.empty(length + _PAGE_BYTES, np.uint8)
    start = -fresh.ctypes.data % _PAGE_BYTES
    return memoryview(fresh[start : start + length])
