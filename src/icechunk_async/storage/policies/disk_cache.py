"""The disk tier of the cache: one directory for all repositories and processes of a user.

Files appear whole, by a rename, and are trusted only if their checksum fits. Nothing is synced to
disk: the checksum finds what a power cut damaged.

The size of the directory is kept by all processes that write to it. One small file, the ledger,
holds the number of bytes in the directory. A writer locks it, adds the size of its file, and makes
room first if necessary. The number may be too large (a process died before it wrote, a file was
removed by hand) but never too small. A scan of all files makes it exact: when room is needed, and
once an hour.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import stat
import struct
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async.storage.policies.memory_cache import fits, part_name
from icechunk_async.storage.protocol import (
    Retrieved,
    Version,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from icechunk_async.storage.protocol import RangeRequest

__all__ = ["CACHE_BLOCK_BYTES", "DiskTier", "Space", "dump", "load"]

_MAGIC: Final = b"ICACHE\r\n"
_HEADER: Final = struct.Struct(">8s32s")
_LENGTHS: Final = struct.Struct(">IQ")
_START: Final = _HEADER.size + _LENGTHS.size
_MAX_ABOUT_BYTES: Final = 16 * 1024
"""A key has at most 1 KiB, six times that when escaped; versions are short."""
_log = logging.getLogger(__name__)
_FOLDER: Final = "icechunk-async-1"
"""The subdirectory; a change of the file format gets a new number."""
_LONGEST_PART: Final = 64
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe put there must not block the reader, nor a link lead elsewhere."""
CACHE_BLOCK_BYTES: Final = 4096
"""Files are counted in whole blocks, the unit in which disks allocate space."""
_LEDGER: Final = struct.Struct(">qqI")
_EXACT_FOR_US: Final = 3600 * 1_000_000
_KEEP: Final = 0.9
"""The fraction of the capacity that eviction leaves, so that not every write has to evict."""
_LOCK_TIMEOUT_SECONDS: Final = 0.25


def dump(namespace: str, key: str, request: RangeRequest, retrieved: Retrieved) -> bytes:
    """Return the header of the file that keeps a reply."""
    modified = retrieved.last_modified
    about = json.dumps(
        [
            *(namespace, key, part_name(request), retrieved.version.token, retrieved.size_bytes),
            None if modified is None else clock.to_us(modified),
        ]
    ).encode()
    rest = _LENGTHS.pack(len(about), len(retrieved.data)) + about
    return _HEADER.pack(_MAGIC, _digest(rest, retrieved.data)) + rest


def load(
    file: IO[bytes], size_bytes: int, namespace: str, key: str, request: RangeRequest
) -> Retrieved:
    """Read a reply from an unbuffered file of ``size_bytes``.

    Raises:
        ValueError: the file is damaged, or holds the reply to another request.
    """
    start = file.read(_START)
    if len(start) != _START:
        raise ValueError("the file is too short")
    magic, digest = _HEADER.unpack_from(start)
    about_bytes, data_bytes = _LENGTHS.unpack_from(start, _HEADER.size)
    # Sizes are checked against the file before they are trusted, so that no file can request more
    # memory than it occupies.
    if (
        magic != _MAGIC
        or about_bytes > _MAX_ABOUT_BYTES
        or _START + about_bytes + data_bytes != size_bytes
    ):
        raise ValueError("the header is damaged")
    about, data = file.read(about_bytes), _read(file, data_bytes)
    if _digest(start[_HEADER.size :] + about, data) != digest:
        raise ValueError("the checksum is wrong")
    try:
        *place, token, size, modified = json.loads(about)
    except RecursionError as error:
        raise ValueError("the description is damaged") from error
    # Names are hashes that are cut, and files may be moved: the content says what it is of.
    if place != [namespace, key, part_name(request)]:
        raise ValueError("the file holds the reply to another request")
    if (
        not isinstance(token, str)
        or not isinstance(size, int)
        or not isinstance(modified, int | None)
    ):
        raise ValueError("the description is damaged")  # noqa: TRY004 - the caller's one error
    at = None if modified is None else clock.from_us(modified)
    retrieved = Retrieved(data, Version(token), size, at)
    if size < 0 or not fits(request, retrieved):
        raise ValueError("the number of bytes is wrong")
    return retrieved


def _read(file: IO[bytes], count: int) -> bytes:
    """Read exactly ``count`` bytes; systems return at most about 2 GiB at once."""
    data = file.read(count)
    if len(data) == count:
        return data
    pieces = [data]
    while pieces[-1] and (missing := count - sum(map(len, pieces))):
        pieces.append(file.read(missing))
    return b"".join(pieces)


def _digest(rest: bytes, data: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(rest)
    checksum.update(data)
    return checksum.digest()


class DiskTier:
    """Replies of one storage, by key and range. Blocking; thread-safe.

    Never raises ``OSError``: a disk that is full, read-only or broken only disables the cache. The
    first such failure is logged.
    """

    def __init__(self, directory: str | os.PathLike[str], capacity_bytes: int, place: str) -> None:
        """Use a directory, which is made at the first use.

        Args:
            directory: shared by all storages and processes.
            capacity_bytes: maximum size of all files in it, of any writer.
            place: identifies this storage, such as its URL; only a hash of it is stored.
        """
        self._namespace = hashlib.sha256(place.encode(errors="replace")).hexdigest()[:32]
        self._directory = Path(directory)
        self._root = self._directory / _FOLDER
        self._folder = self._root / "objects" / self._namespace
        self._capacity = capacity_bytes
        self._space = Space(self._root, capacity_bytes)
        self._usable: bool | None = None
        self._warned = False

    def read(self, key: str, request: RangeRequest) -> Retrieved | None:
        """Return the entry of exactly this request; a damaged file is removed."""
        path = self._path(key, request)
        if path is None:
            return None
        try:
            if not self._prepared():
                return None
            try:
                descriptor = os.open(path, _READ)
            except FileNotFoundError:
                return None
            with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
                found = os.fstat(descriptor)
                try:
                    self._check(found)
                    size = found.st_size
                    retrieved = load(file, size, self._namespace, key, request)
                except ValueError as error:
                    _log.info("%s was removed from the cache: %s", path, error)
                    path.unlink(missing_ok=True)
                    return None
                # The time of a file is that of its last use: the oldest are evicted first.
                now = clock.now_us() * 1000
                with suppress(OSError):  # a read-only disk is still good for reading
                    os.utime(descriptor, ns=(now, now))
                return retrieved
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link is in its place, which nobody follows
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            self._warn(error)
            return None

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError("it is not a file of ours")
        if found.st_size > self._capacity:
            raise ValueError("it is larger than the cache")

    def write(
        self,
        key: str,
        request: RangeRequest,
        retrieved: Retrieved,
        *,
        still_right: Callable[[], bool],
    ) -> None:
        """Keep a reply, evicting those used longest ago.

        ``still_right`` is called once the file is in place; if it returns False, the file is
        removed.
        """
        path = self._path(key, request)
        if path is None:
            return
        try:
            if not self._prepared():
                return
            self._publish(path, dump(self._namespace, key, request, retrieved), retrieved)
            # Asked when the file is there: a deletion before that found nothing to remove.
            if not still_right():
                path.unlink(missing_ok=True)
        except FileNotFoundError:  # the directory was removed: the next write creates it
            self._usable = None
        except OSError as error:
            self._warn(error)

    def _publish(self, path: Path, header: bytes, retrieved: Retrieved) -> None:
        size = len(header) + len(retrieved.data)
        with self._space.room(size) as reserved:
            if reserved is None:
                return
            descriptor, unfinished = reserved
            for piece in (header, retrieved.data):
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            now = clock.now_us() * 1000
            os.utime(descriptor, ns=(now, now))
            try:
                unfinished.rename(path)
            except FileNotFoundError:  # the folder is new, or was removed when it was empty
                self._make_folder(path.parent)
                unfinished.rename(path)

    def drop(self, keys: Iterable[str]) -> None:
        """Remove all entries of the given objects."""
        by_folder: dict[Path, set[str]] = {}
        for key in keys:
            path = self._path(key, None)
            assert path is not None
            by_folder.setdefault(path.parent, set()).add(path.name.partition(".")[0])
        try:
            if not self._prepared():
                return
            for folder, stems in by_folder.items():
                with suppress(FileNotFoundError):
                    for name in os.listdir(folder):  # noqa: PTH208 - names are enough
                        if name.partition(".")[0] in stems:
                            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)

    def _path(self, key: str, request: RangeRequest) -> Path | None:
        """Return the path of an entry; None if its name would be too long for a file."""
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        part = part_name(request)
        if len(part) > _LONGEST_PART:
            return None
        return self._folder / name[:2] / f"{name}.{part}"

    def _prepared(self) -> bool:
        """Create the directory at the first use; return whether its files can be trusted.

        A checksum finds damage, not malice: others must not be able to write here.
        """
        if self._usable is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root.mkdir(mode=0o700, exist_ok=True)
            found = self._root.lstat()
            self._usable = (
                stat.S_ISDIR(found.st_mode)
                and found.st_uid == os.geteuid()
                and not found.st_mode & 0o077
            )
            if not self._usable:
                raise PermissionError(
                    errno.EPERM, "other users can write there, or own it", str(self._root)
                )
        return self._usable

    def _make_folder(self, folder: Path) -> None:
        for path in (self._root, self._root / "objects", self._folder, folder):
            path.mkdir(mode=0o700, exist_ok=True)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "The disk cache in %s does not work, and reads go to the storage: %s. It needs "
                "a directory that you own, that nobody else can write to, and free space.",
                self._directory,
                error,
            )


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
            # Before the file is made: a process that dies in between leaves a number that is too
            # large, and the next scan corrects it.
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
            # Oldest first, by the time of the last use.
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
