"""Publish a finished file under its final name, in one atomic step.

Every change of a name in a folder happens under the folder's lock: shared if the previous state
does not matter, exclusive if it does. A creation needs no lock if hard links work, because the
kernel creates a link only if the name is free. The folder cannot disappear meanwhile, because it
holds the unfinished file.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import (
    OutcomeUnknownError,
    PreconditionFailedError,
    UnsafeStorageError,
)
from icechunk_async.storage import ABSENT, Version
from icechunk_async_local.durability import OpenFile, flush
from icechunk_async_local.filesystems import locked
from icechunk_async_local.paths import RESERVED_PREFIX
from icechunk_async_local.versions import next_time_us, time_us, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from icechunk_async.storage import Absent, Expected
    from icechunk_async_local.filesystems import Abilities
    from icechunk_async_local.paths import Place, Tree

__all__ = ["Draft", "Publisher", "draft", "refused"]

# Errors by which file systems say that they make no links. EMLINK: the file has as many as it may
# have, and then the lock decides.
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
_NOTHING_HAPPENED: Final = frozenset(
    {errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV}
    | {errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EBUSY}
)
"""Errors that the kernel raises before it starts; after any other the name may be in place."""


class Draft:
    """A complete file in an open folder, under a reserved name."""

    __slots__ = ("folder", "kept", "name", "opened", "state", "synced")

    def __init__(
        self,
        folder: int,
        name: bytes,
        state: os.stat_result,
        *,
        synced: bool,
        opened: OpenFile | None,
    ) -> None:
        """Keep what is known of the file."""
        self.folder = folder
        self.name = name
        self.state = state
        self.synced = synced
        self.opened = opened
        """None if it is closed."""
        self.kept = True
        """Whether the reserved name still has to be removed."""


@contextmanager
def draft(
    folder: int,
    fill: Callable[[int], None],
    sync: Callable[[int], None] | None = None,
    keeps_open: Callable[[os.stat_result], bool] = lambda _: False,
) -> Generator[Draft]:
    """Write a file under a reserved name; that name is gone when the block ends.

    Args:
        folder: an open folder.
        fill: writes all bytes to the descriptor that it is given.
        sync: makes the file durable.
        keeps_open: returns whether a file that is not synced yet stays open until then.

    Raises:
        FileNotFoundError: the folder was removed.
        OSError: the file could not be written; nothing is left of it.
    """
    name = RESERVED_PREFIX + f"{os.getpid():x}-{os.urandom(8).hex()}".encode()
    # Never into a file, nor through a link, that somebody else put there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(name, flags, 0o666, dir_fd=folder)  # the umask decides, as for any file
    finished: Draft | None = None
    opened: OpenFile | None = None
    try:
        try:
            fill(fd)
            written = os.fstat(fd)
            # The kernel stamps with the time of its last tick, so two states of an object that
            # follow quickly would have one version. The time is set before the sync, which keeps
            # it, and before the name, so that nobody sees a version that is not final.
            time_ns = next_time_us(written) * 1000
            os.utime(fd, ns=(time_ns, time_ns))
            state = os.fstat(fd)
            if sync is not None:
                sync(fd)
            if sync is None and keeps_open(state):
                opened = OpenFile(fd)
        finally:
            if opened is None:
                os.close(fd)  # before it gets its name: network file systems write only now
        finished = Draft(folder, name, state, synced=sync is not None, opened=opened)
        yield finished
    finally:
        if finished is None or finished.kept:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


class Publisher:
    """Gives finished files their names, by the means of the file system."""

    def __init__(self, tree: Tree, abilities: Abilities, lock_timeout_seconds: float) -> None:
        """Store the abilities of the file system."""
        self._tree = tree
        self._abilities = abilities
        self._lock_timeout_seconds = lock_timeout_seconds

    def publish(self, finished: Draft, place: Place, expected: Expected) -> Version:
        """Give a finished file its name if the object is in the expected state.

        Raises:
            PreconditionFailedError: it is in another state; nothing changed.
            OutcomeUnknownError: the file system failed and the outcome is open.
            OSError: nothing changed.
        """
        if expected is None:
            # Shared with other writers, not with updates: between the look of an update and its
            # renaming a plain write would be overwritten although it was acknowledged.
            with self.lock(finished.folder, place, exclusive=False):
                self._rename(finished, place, repeatable=True)
                return version_of(finished.state)
        if expected is ABSENT and self._abilities.links and self._link(finished, place):
            return version_of(finished.state)
        if not self._abilities.locks:
            raise UnsafeStorageError(
                f"Could not write {place.key!r} on condition: {self._tree.path(place.folders)!r} "
                "takes neither hard links nor locks. Nothing changed. Use another file system.",
                key=place.key,
            )
        # From here to the renaming no other handle changes a name in this folder.
        with self.lock(finished.folder, place, exclusive=True):
            found = _state_of(finished.folder, place.name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                _clear_the_way(finished.folder, place)
                found = None
            if expected != (ABSENT if found is None else version_of(found)):
                raise refused(place.key, expected, found)
            # Inode numbers are used again. A time that ascends along the states of an object keeps
            # a later state from having the version of an earlier one, which somebody may expect.
            if found is not None and time_us(found) >= time_us(finished.state):
                _set_later(finished, time_us(found))
            self._rename(finished, place)
            return version_of(finished.state)

    def lock(self, folder: int, place: Place, *, exclusive: bool) -> AbstractContextManager[None]:
        """Hold the lock of an open folder, if locks work."""
        if not self._abilities.locks:
            return nullcontext()
        return locked(
            folder,
            lambda: self._tree.path(place.folders),
            exclusive=exclusive,
            timeout_seconds=self._lock_timeout_seconds,
        )

    def _rename(self, finished: Draft, place: Place, *, repeatable: bool = False) -> None:
        folder = finished.folder
        try:
            try:
                os.rename(finished.name, place.name, src_dir_fd=folder, dst_dir_fd=folder)
            except IsADirectoryError:
                _clear_the_way(folder, place)
                os.rename(finished.name, place.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            # A file that is gone was removed with the garbage, since its writer was stopped for so
            # long. Or NFS repeated a request that was carried out, so only plain writes continue.
            gone = repeatable and _state_of(folder, finished.name) is None
            if gone and error.errno == errno.ENOENT:
                raise
            if error.errno in _NOTHING_HAPPENED:
                raise
            raise _unknown(place, error) from error
        finished.kept = False

    def _link(self, finished: Draft, place: Place) -> bool:
        """Link the file to its name if that is free; False if links do not work."""
        folder = finished.folder
        try:
            try:
                _link_in(folder, finished.name, place.name)
            except FileExistsError:
                found = _state_of(folder, place.name)
                if found is None or not stat.S_ISDIR(found.st_mode):
                    raise
                _clear_the_way(folder, place)
                _link_in(folder, finished.name, place.name)
        except FileExistsError:
            # NFS repeats a request whose reply was lost, and may so refuse what it has already
            # done. Only our own name and the object's can be links to this file.
            own = os.stat(finished.name, dir_fd=folder, follow_symlinks=False)
            if own.st_nlink < 2:
                raise refused(place.key, ABSENT, _state_of(folder, place.name)) from None
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            if error.errno in _NOTHING_HAPPENED:
                raise
            raise _unknown(place, error) from error
        return True


def refused(
    key: str, expected: Version | Absent, found: os.stat_result | None
) -> PreconditionFailedError:
    """Return the error for an object that is not in the expected state."""
    state = "does not exist" if found is None else f"is at {version_of(found)}"
    return PreconditionFailedError(
        f"{key!r} {state}, not {expected}; nothing was changed. Read it again.",
        key=key,
        expected=expected,
    )


def _link_in(folder: int, name: bytes, target: bytes) -> None:
    os.link(name, target, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


def _state_of(folder: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _clear_the_way(folder: int, place: Place) -> None:
    """Remove an empty folder with the name of the object, left over from longer keys.

    Raises:
        IsADirectoryError: it is not empty.
    """
    try:
        os.rmdir(place.name, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from error


def _set_later(finished: Draft, than_us: int) -> None:
    """Set the time of a finished file later than that of the object it replaces."""
    time_ns = next_time_us(finished.state, later_than=than_us) * 1000
    os.utime(finished.name, ns=(time_ns, time_ns), dir_fd=finished.folder, follow_symlinks=False)
    flags = os.O_RDONLY | os.O_NOFOLLOW
    fd = os.open(finished.name, flags, dir_fd=finished.folder)
    try:
        finished.state = os.fstat(fd)
        if finished.synced:
            flush(fd)
    finally:
        os.close(fd)


def _unknown(place: Place, error: OSError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"{place.key!r} was written, but giving it its name failed: {error}. It may be "
        "there or not. Read it to know.",
        key=place.key,
    )
