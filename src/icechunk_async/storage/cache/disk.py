"""The disk tier of the cache: one directory for all repositories and processes of a user.

Files appear whole, by a rename, and are trusted only if their checksum fits. Nothing is synced to
disk: the checksum finds what a power cut damaged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async.storage.cache.disk_space import Space
from icechunk_async.storage.cache.entries import fits, part_name
from icechunk_async.storage.protocol import (
    Retrieved,
    Version,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from icechunk_async.storage.protocol import RangeRequest

__all__ = ["DiskTier", "dump", "load"]


_MAGIC: Final = b"ICACHE\r\n"
_HEADER: Final = struct.Struct(">8s32s")
_LENGTHS: Final = struct.Struct(">IQ")
_START: Final = _HEADER.size + _LENGTHS.size
_MAX_ABOUT_BYTES: Final = 16 * 1024
"""A key has at most 1 KiB, six times that when escaped; versions are short."""


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


_log = logging.getLogger(__name__)
_FOLDER: Final = "icechunk-async-1"
"""The subdirectory; a change of the file format gets a new number."""
_LONGEST_PART: Final = 64
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe put there must not block the reader, nor a link lead elsewhere."""


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
                now = clock.now_us() * 1000
                with suppress(OSError):  # a read-only disk is still good for reading
                    os.utime(descriptor, ns=(now, now))
                return retrieved
        except OSError as error:
            if error.errno == errno.ELOOP:
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
