"""The size of a cache directory, maintained by all processes that write to it.

One small file, the ledger, holds the number of bytes in the directory. A writer locks it, adds the
size of its file, and makes room first if necessary. The number may be too large (a process died
before it wrote, a file was removed by hand) but never too small. A scan of all files makes it
exact: when room is needed, and once an hour.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import time
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

__all__ = ["CACHE_BLOCK_BYTES", "Space"]

CACHE_BLOCK_BYTES: Final = 4096
"""Files are counted in whole blocks, the unit in which disks allocate space."""

_LEDGER: Final = struct.Struct(">qqI")
_EXACT_FOR_US: Final = 3600 * 1_000_000
_KEEP: Final = 0.9
"""The fraction of the capacity that eviction leaves, so that not every write has to evict."""
_LOCK_TIMEOUT_SECONDS: Final = 0.25


class Space:
    """The files below one directory, ``objects/<namespace>/<shard>/<name>``, up to a capacity.

    Blocking; usable from any thread and process. Raises ``OSError`` if a system call fails.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        *,
        lock_timeout_seconds: float = _LOCK_TIMEOUT_SECONDS,
    ) -> None:
        """Manage ``root``; nothing is read or created yet."""
        self._objects = root / "objects"
        self._unfinished = root / "unfinished"
        self._ledger = root / "ledger"
        self._capacity = capacity_bytes
        self._lock_timeout = lock_timeout_seconds

    @contextmanager
    def room(self, size_bytes: int) -> Generator[tuple[int, Path] | None]:
        """Create a file of ``size_bytes``, which the caller writes and moves into place.

        Yields its descriptor and path; or None if there is no room, or if others hold the ledger
        for too long. A file that was not moved is removed; if the process dies, the next scan
        removes it.
        """
        reserved = self._reserve(size_bytes)
        if reserved is None:
            yield None
            return
        descriptor, path = reserved
        try:
            yield reserved
        finally:
            try:
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)  # last: until then the file counts as being written

    def _reserve(self, size_bytes: int) -> tuple[int, Path] | None:
        cost = _cost(size_bytes)
        if cost > self._capacity:
            return None
        with self._locked() as ledger:
            if ledger is None:
                return None
            held, exact_at = _read_ledger(ledger)
            if held is None or held + cost > self._capacity:
                most = self._capacity - cost
                held = self._count(most, min(most, int(self._capacity * _KEEP)))
                exact_at = clock.now_us()
                if held > most:  # others are writing the remaining files
                    return None
            _write_ledger(ledger, held + cost, exact_at)
            self._unfinished.mkdir(mode=0o700, exist_ok=True)
            path = self._unfinished / secrets.token_hex(16)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, size_bytes)  # a concurrent scan sees its final size
            except BaseException:
                path.unlink()
                os.close(descriptor)
                raise
        return descriptor, path

    @contextmanager
    def _locked(self) -> Generator[int | None]:
        """Lock the ledger against other threads and processes; None if that takes too long."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        ledger = os.open(self._ledger, flags, 0o600)
        try:
            yield ledger if self._lock(ledger) else None
        finally:
            os.close(ledger)

    def _lock(self, ledger: int) -> bool:
        deadline = time.monotonic() + self._lock_timeout
        while True:
            try:
                fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            else:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)  # a stopped process must not stop all the others

    def _count(self, most: int, target: int) -> int:
        """Return the size of all files; above ``most``, first evict the oldest down to ``target``.

        Also removes files of dead writers. Called only under the lock, so that no file is created
        meanwhile.
        """
        held = sum(map(_unless_abandoned, _entries(self._unfinished)))
        found: list[tuple[int, int, str]] = []
        emptied: list[str] = []
        for namespace in _entries(self._objects):
            shards = 0
            for shard in _entries(namespace):
                shards += 1
                files = [
                    (it.stat().st_mtime_ns, _cost(it.stat().st_size), it.path)
                    for it in _entries(shard)
                    if it.is_file(follow_symlinks=False)
                ]
                found += files
                if not files:
                    emptied.append(shard.path)
            if not shards:
                emptied.append(namespace.path)
        held += sum(cost for _, cost, _ in found)
        if held > most:
            for _, cost, path in sorted(found):
                if held <= target:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108 - one of very many
                held -= cost
        for path in emptied:
            with suppress(OSError):  # no longer empty
                os.rmdir(path)  # noqa: PTH106 - as above
        return held


def _cost(size_bytes: int) -> int:
    return -(-size_bytes // CACHE_BLOCK_BYTES) * CACHE_BLOCK_BYTES


def _entries(folder: os.PathLike[str] | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """Iterate over a folder; one that is missing or no folder has no entries."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries


def _unless_abandoned(entry: os.DirEntry[str]) -> int:
    """Return the final size of an unfinished file; one whose writer is dead is removed."""
    try:
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # the writer holds it as long as it lives
        return _cost(os.fstat(descriptor).st_size)
    else:
        with suppress(FileNotFoundError):
            os.unlink(entry.path)  # noqa: PTH108 - the entry has no other form
        return 0
    finally:
        os.close(descriptor)


def _read_ledger(ledger: int) -> tuple[int | None, int]:
    """Return the bytes held and when they were counted; None if the ledger is unreadable."""
    if not stat.S_ISREG(os.fstat(ledger).st_mode):
        raise OSError(errno.EINVAL, "the ledger of the cache is not a file")
    content = os.pread(ledger, _LEDGER.size + 1, 0)
    if len(content) != _LEDGER.size:
        return None, 0
    held, exact_at, checksum = _LEDGER.unpack(content)
    age = clock.now_us() - exact_at
    if checksum != zlib.crc32(content[:-4]) or held < 0 or not 0 <= age < _EXACT_FOR_US:
        return None, 0
    return held, exact_at


def _write_ledger(ledger: int, held: int, exact_at: int) -> None:
    content = struct.pack(">qq", held, exact_at)
    os.pwrite(ledger, content + zlib.crc32(content).to_bytes(4), 0)
    os.ftruncate(ledger, _LEDGER.size)
