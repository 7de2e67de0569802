"""Whole operations on files: each is one blocking call that does everything or nothing."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from functools import partial
from itertools import batched, groupby
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import (
    IcechunkError,
    OutcomeUnknownError,
    StorageError,
    StorageUnavailableError,
    UnsafeStorageError,
)
from icechunk_async.storage import (
    Absent,
    Data,
    DeleteFailure,
    Expected,
    RangeRequest,
    Retrieved,
    Version,
    slice_range,
)
from icechunk_async_local.failures import MISSING, explain, missing, refuse_link
from icechunk_async_local.memory import fresh_memory
from icechunk_async_local.paths import KeptFolders
from icechunk_async_local.publishing import draft, refused
from icechunk_async_local.versions import any_below, modified_at, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from icechunk_async.storage import Capabilities
    from icechunk_async_local.batching import Loan
    from icechunk_async_local.durability import Ledger
    from icechunk_async_local.paths import Place, Tree
    from icechunk_async_local.publishing import Publisher

__all__ = ["Files"]

_ATTEMPTS: Final = 100
_LOCKED_TOGETHER: Final = 64
"""Files deleted under one lock; a few milliseconds at most."""
_STEP_BYTES: Final = 1 << 20
_MOST_AT_ONCE: Final = 2 << 20
# Without waiting: a pipe in the place of an object would block the thread until somebody writes to
# it. What is no regular file is refused once it is open.
_READ: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
_NOT_IN_KERNEL: Final = frozenset(
    {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}
)


class Files:
    """The operations of one storage. Thread-safe."""

    def __init__(
        self, tree: Tree, ledger: Ledger, publisher: Publisher, capabilities: Capabilities
    ) -> None:
        """Work below the root of ``tree``."""
        self.tree = tree
        self.ledger = ledger
        self.kept = KeptFolders(tree)
        self._publisher = publisher
        self.capabilities = capabilities

    def read(self, place: Place, byte_range: RangeRequest = None) -> Retrieved:
        """Read a file or part of it."""
        retrieved = self._read(place, byte_range, None)
        assert retrieved is not None  # only an unchanged version answers None
        return retrieved

    def read_bytes(self, place: Place, start: int, stop: int) -> bytes | None:
        """Return bytes ``[start, stop)`` of a file; None if `read` must find the error.

        Something that is no file cannot be read at a position, so its kind is not checked. Its size
        is not checked either, so the length is bounded by memory that may be allocated on an
        unverified request.
        """
        if stop - start > _MOST_AT_ONCE:
            return None
        try:
            fd = self.kept.open_file(place.folders, place.name, _READ)
            try:
                data = os.pread(fd, stop - start, start)
            finally:
                os.close(fd)
        except OSError:
            return None
        return data if len(data) == stop - start else None

    def read_if_changed(self, place: Place, version: Version) -> Retrieved | None:
        """Read a file unless it is at ``version``, which costs no reading."""
        return self._read(place, None, version)

    def write(
        self, place: Place, data: Data, expected: Expected, loan: Loan | None = None
    ) -> Version:
        """Write a file in place of any other, or of the expected one.

        Raises:
            TakenBackError: ``loan`` ended before all was written; nothing changed.
        """
        view = memoryview(data)
        view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        return self._write(place, partial(self._fill, view, loan), expected)

    def copy(self, source: Place, target: Place, if_version: Version | None) -> Version:
        """Copy one file to another, inside the kernel if possible."""
        return self.copy_from(self, source, target, if_version)

    def copy_from(
        self, files: Files, source: Place, target: Place, if_version: Version | None
    ) -> Version:
        """Copy a file of another folder of this machine, inside the kernel if possible."""
        # An open file stays the one whose version was compared: its replacement gets another inode.
        fd, found = files.open_object(source)
        try:
            if if_version not in (None, version_of(found)):
                assert if_version is not None
                raise refused(source.key, if_version, found)
            return self._write(target, partial(_copy_all, fd, found.st_size), None)
        finally:
            os.close(fd)

    def delete(self, places: Iterable[Place]) -> list[DeleteFailure]:
        """Delete files, and the folders that this leaves empty."""
        self._require("writable")
        failures: list[DeleteFailure] = []
        for folders, group in groupby(places, key=lambda place: place.folders):
            failures += self._delete_in(folders, list(group))
        return failures

    def _read(
        self, place: Place, byte_range: RangeRequest, unless: Version | None
    ) -> Retrieved | None:
        fd = self._open(place)
        try:
            found = self._state_of_object(fd, place)
            version = version_of(found)
            if version == unless:
                return None
            start, stop = slice_range(byte_range, found.st_size)
            try:
                data = _read_all(fd, start, stop)
            except OSError as error:
                raise self._explain(error, "read", place) from error
        finally:
            os.close(fd)
        if len(data) != stop - start:
            raise StorageError(
                f"Bytes {start} to {stop} of {place.key!r} were asked for and {len(data)} found: "
                "another program cut the file short. Objects must not be changed in place.",
                key=place.key,
            )
        return Retrieved(data, version, found.st_size, modified_at(found))

    def open_object(self, place: Place) -> tuple[int, os.stat_result]:
        """Open a file for reading; return its descriptor, which the caller closes, and state."""
        fd = self._open(place)
        try:
            return fd, self._state_of_object(fd, place)
        except BaseException:
            os.close(fd)
            raise

    def _open(self, place: Place) -> int:
        try:
            return self.tree.open_file(place.folders, place.name, _READ)
        except OSError as error:
            raise self._explain(error, "read", place) from error

    def _state_of_object(self, fd: int, place: Place) -> os.stat_result:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise missing(place.key)
        return found

    def _write(self, place: Place, fill: Callable[[int], None], expected: Expected) -> Version:
        self._require("writable")
        if expected is not None:
            creates = isinstance(expected, Absent)
            self._require("conditional_create" if creates else "conditional_update")
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    return self._write_once(place, fill, expected)
                except FileNotFoundError:  # someone removes empty folders: create them again
                    if attempt > _ATTEMPTS // 10:  # the remover seems to run in lockstep
                        time.sleep(any_below(1000) / 1e6)
        except OSError as error:
            raise self._explain(error, "write", place) from error
        raise StorageUnavailableError(
            f"Could not write {place.key!r}: {self.tree.path(place.folders)!r} was removed "
            f"each of {_ATTEMPTS} times it was made. Find out who removes it, then try again.",
            key=place.key,
        )

    def _fill(self, view: memoryview, loan: Loan | None, fd: int) -> None:
        _write_all(view, fd)
        if loan is not None:
            loan.check()
        self.ledger.filled(fd, len(view))

    def _write_once(self, place: Place, fill: Callable[[int], None], expected: Expected) -> Version:
        try:
            folder = self.tree.open_folder(place.folders, to_list=True)
        except FileNotFoundError:
            # Refused before a folder is made: an update of a missing object leaves nothing behind.
            if isinstance(expected, Version):
                raise refused(place.key, expected, None) from None
            folder = self.tree.make_folder(place.folders, self.ledger.made)
        try:
            conditional = expected is not None
            # What a conditional write refers to must be durable before the reference is seen, or a
            # power cut leaves a reference to nothing. Plain writes wait for the next of these.
            sync = self.ledger.sync_with if conditional and self.ledger.active else None
            with draft(folder, fill, sync, self.ledger.keeps_open) as finished:
                version = self._publisher.publish(finished, place, expected)
            try:
                if conditional:
                    # Others act on what they see, and write elsewhere: so the name is made durable
                    # before the answer, too.
                    self.ledger.secure(folder, place.folders)
                else:
                    self.ledger.wrote(folder, place, finished.opened)
            except OSError as error:
                raise OutcomeUnknownError(
                    f"{place.key!r} was written, and may not survive a power cut: {error}. Look "
                    "into the system log, then write it again.",
                    key=place.key,
                ) from error
            return version
        finally:
            os.close(folder)

    def _delete_in(self, folders: tuple[bytes, ...], places: list[Place]) -> list[DeleteFailure]:
        try:
            folder = self.tree.open_folder(folders, to_list=True)
        except OSError as error:
            # A missing folder has no objects, so they count as deleted. A link in its place is
            # reported by the same number on Linux (ENOTDIR, since O_DIRECTORY and O_NOFOLLOW are
            # both set), and must not be taken for that.
            if error.errno in MISSING and self.tree.link_on_the_way(places[0]) is None:
                return []
            return [
                DeleteFailure(place.key, self._explain(error, "delete", place)) for place in places
            ]
        try:
            failures = list(self._delete_each(folder, places))
        finally:
            os.close(folder)
        if folders and len(failures) < len(places):
            self._remove_if_empty(folders)
        return failures

    def _delete_each(self, folder: int, places: list[Place]) -> Iterator[DeleteFailure]:
        """Delete files of one folder: a few with each lock, so that writers need not wait."""
        # Shared, as for plain writes: that an object is gone must not come between the look of an
        # update and its renaming, which would bring it back.
        for group in batched(places, _LOCKED_TOGETHER):
            gone: list[Place] = []
            try:
                with self._publisher.lock(folder, group[0], exclusive=False):
                    failures = list(self._unlink_each(folder, group, gone))
                yield from failures
                if gone:
                    self.ledger.changed(folder, gone[0].folders)
            except OSError as error:  # a deletion may be undone by a power cut
                for place in gone or group:
                    yield DeleteFailure(place.key, self._explain(error, "delete", place))
            except IcechunkError as error:
                for place in group:
                    yield DeleteFailure(place.key, error)

    def _unlink_each(
        self, folder: int, places: Iterable[Place], gone: list[Place]
    ) -> Iterator[DeleteFailure]:
        """Remove names; ``gone`` gets those that were there."""
        for place in places:
            try:
                os.unlink(place.name, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                if not _is_directory(folder, place.name):
                    yield DeleteFailure(place.key, self._explain(error, "delete", place))
            else:
                gone.append(place)

    def _remove_if_empty(self, folders: tuple[bytes, ...]) -> None:
        # A writer's unfinished file keeps its folder. A writer that has only opened the folder
        # finds it gone, and makes it again (`_write`).
        while folders:
            *above, name = folders
            folders = tuple(above)
            try:
                with self.tree.folder(folders) as fd:
                    os.rmdir(name, dir_fd=fd)
            except OSError:  # usually it is not empty; nothing depends on its removal
                return

    def _require(self, promise: str) -> None:
        if not getattr(self.capabilities, promise):
            reason = self.capabilities.reasons[promise]
            raise UnsafeStorageError(
                f"{self.tree.path(())!r} does not promise {promise!r}, so nothing was done: "
                f"{reason}.",
                promise=promise,
            )

    def _explain(self, error: OSError, action: str, place: Place) -> IcechunkError:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            link = self.tree.link_on_the_way(place)
            if link is not None:
                return refuse_link(action, place.key, link)
        if action == "read" and error.errno in MISSING:
            return missing(place.key)
        path = self.tree.path(place.folders, place.name)
        return explain(error, action, path, key=place.key)


def _is_directory(folder: int, name: bytes) -> bool:
    """Return whether this is a folder, because systems report that by different errors."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _read_all(fd: int, start: int, stop: int) -> memoryview:
    """Read the bytes of a range, or those that exist."""
    view = fresh_memory(stop - start)
    have = count = os.preadv(fd, (view,), start)
    while count and have < len(view):  # the kernel reads at most 2 GiB at a time
        count = os.preadv(fd, (view[have:],), start + have)
        have += count
    return view[:have].toreadonly()


def _write_all(data: memoryview, fd: int) -> None:
    written = 0
    # One call writes at most 2 GiB on Linux, and less if a signal comes.
    while written < len(data):
        written += os.write(fd, data[written:])


def _copy_all(source: int, size_bytes: int, target: int) -> None:
    copied = 0
    while copied < size_bytes and sys.platform == "linux":
        try:
            step = os.copy_file_range(source, target, size_bytes - copied, offset_src=copied)
        except OSError as error:
            if error.errno not in _NOT_IN_KERNEL:
                raise
            break
        # Cut short by another program, or a file system that copies nothing; reading tells which.
        if step == 0:
            break
        copied += step
    while copied < size_bytes:
        data = os.pread(source, min(_STEP_BYTES, size_bytes - copied), copied)
        if not data:
            raise OSError(errno.EIO, "the file that is copied was cut short by another program")
        _write_all(memoryview(data), target)
        copied += len(data)
