"""The ledger of writes that a power cut could still lose, and the syncs that make them durable.

A file is durable once its bytes and every directory entry that leads to it are synced. Syncing each
chunk as it is written would cost a wait for the disk each; so a handle remembers the files that it
wrote and the folders whose entries it changed, up to a bound, and syncs all of them together before
a conditional write makes them reachable.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from functools import partial
from itertools import batched
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from icechunk_async.errors import StorageError
from icechunk_async_local.batching import Helpers
from icechunk_async_local.failures import MISSING
from icechunk_async_local.filesystems import (
    begin_writing_out,
    can_sync_at_once,
    sync_file_system,
)
from icechunk_async_local.paths import OpenFolder

if sys.platform == "darwin":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from icechunk_async_local.paths import Place, Tree

__all__ = ["FEW", "MOST_REMEMBERED", "Ledger", "OpenFile", "flush"]

MOST_REMEMBERED: Final = 10_000
"""The maximum number of files, and of folders, that wait for a sync; together about 4 MB."""

FEW: Final = 64
"""Up to this many entries are synced one by one; above it one ``syncfs`` does it, if sound."""

_THREADS: Final = 12
"""Enough for all that a small commit syncs to be waited for together."""
_MOST_ENTERED: Final = 16
"""Folders held open to know them again; a repository has fewer."""
_MOST_OPEN: Final = 8
_MOST_OPEN_HERE: Final = 64
"""Files that stay open from their write to their sync, of one handle and of the process: those of a
small commit. Others are opened again."""
_LARGE_BYTES: Final = 1 << 19
"""From this size on early write-out pays; smaller files are written out together."""
_GONE: Final = MISSING | {errno.ELOOP}
_NOTHING_TO_SYNC: Final = frozenset({errno.EINVAL, errno.EBADF, errno.EROFS})
"""Errors by which file systems say that directories need no sync."""

_NO_SYNCFS: Final = frozenset({errno.ENOSYS, errno.EPERM})
"""Errors by which sandboxes refuse an unknown system call."""

type _Path = tuple[bytes, ...]
"""Names from the root down."""


_open_files: Final[set[int]] = set()
"""Descriptors of this process."""


class _LostWriteError(OSError):
    """The device lost written bytes; syncing again would hide that."""


class OpenFile:
    """A file that is open since it was written, closed when the last user drops it."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        """Own an open descriptor."""
        self.descriptor = descriptor
        _open_files.add(descriptor)

    def __del__(
        self,
        forget: Callable[[int], None] = _open_files.discard,
        close: Callable[[int], None] = os.close,
    ) -> None:
        """Close the file."""
        forget(self.descriptor)
        close(self.descriptor)


class _Pending:
    __slots__ = ("entered", "files", "folders", "uncounted")

    def __init__(self) -> None:
        self.files: dict[_Path, OpenFile | None] = {}
        self.folders: dict[_Path, OpenFolder | None] = {}
        """Both with what is open already. None: what has the name is opened to sync it."""
        self.uncounted = False
        """More was written than is remembered."""
        self.entered: dict[_Path, _Entered] = {}
        """Folders to which durable entries lead once all of this is synced."""

    def take(self) -> _Pending:
        taken = _Pending()
        taken.give_back(self)
        self.files, self.folders, self.uncounted, self.entered = {}, {}, False, {}
        return taken

    def give_back(self, taken: _Pending) -> None:
        for file, opened in taken.files.items():
            _add(self.files, file, opened)
        for way, folder in taken.folders.items():
            _add(self.folders, way, folder)
        self.uncounted |= taken.uncounted
        self.entered = taken.entered | self.entered


class _Entered(NamedTuple):
    """A folder of the home file system, held open: no other gets its number meanwhile."""

    inode: int
    folder: OpenFolder


class _Home:
    """The file system that was written first, usually the only one below a root."""

    __slots__ = ("at_once", "device", "directory")

    def __init__(self, device: int, directory: int, *, at_once: bool) -> None:
        self.device = device
        self.directory = directory
        """Open since the first write, because a descriptor reports only failures since it was
        opened."""
        self.at_once = at_once
        """Whether one call syncs the whole file system."""


class Ledger:
    """The writes that are not yet durable. Every method may block; thread-safe.

    Attributes:
        active: whether anything is synced at all.
    """

    slow_seconds: ClassVar[float] = 0.001
    """If a sync takes longer, the others run in parallel, from then on all of a commit; a thread
    costs less. Tests set it."""

    def __init__(self, tree: Tree, *, active: bool) -> None:
        """Start empty."""
        self.active = active
        self._tree = tree
        self._lock = threading.RLock()  # guards the next five; no disk is waited for under it
        self._home: _Home | None = None
        self._at_home = _Pending()
        self._elsewhere = _Pending()
        self._entered: dict[_Path, _Entered] = {}
        """Folders to which durable entries lead, so that those above need no further sync."""
        self._above_root: set[Path] = set()
        self._root_entered = False
        self._syncing = threading.Lock()
        self._helpers = Helpers("sync", _THREADS)
        self._lost: str | None = None
        self._is_slow = False
        """Whether the last syncs took long, so that the next begin in parallel."""

    @property
    def used(self) -> bool:
        """Whether anything was ever recorded."""
        return self._home is not None or bool(self._above_root)

    def filled(self, fd: int, size_bytes: int) -> None:
        """Start writing out a large file, so that the sync has less to wait for."""
        if self.active and size_bytes >= _LARGE_BYTES:
            begin_writing_out(fd)

    def keeps_open(self, written: os.stat_result) -> bool:
        """Return whether a file in this state may stay open from its write to its sync.

        Not on network file systems, some of which write a file out when it is closed.
        """
        # Read without the lock: another thread may change the numbers meanwhile, and then a file
        # more or fewer stays open.
        home = self._home
        return (
            self.active
            and home is not None
            and home.at_once
            and written.st_dev == home.device
            and len(self._at_home.files) < _MOST_OPEN
            and len(_open_files) < _MOST_OPEN_HERE
        )

    def wrote(self, folder: int, place: Place, opened: OpenFile | None = None) -> None:
        """Record a file that just received its name in an open folder, and is perhaps open.

        Raises:
            OSError: it could not be recorded, and syncing it immediately failed.
        """
        if not self.active:
            return
        file = (*place.folders, place.name)
        with self._lock:
            pending, home, inode = self._ledger_of(folder)
            remembered = _remember(pending, pending.files, file, opened, home)
            for way, held in self._ways(folder, inode, place.folders, home, pending.entered):
                remembered &= _remember(pending, pending.folders, way, held, home)
        if not remembered:
            failures: list[OSError] = []
            # Beyond the bound a write is as slow as its own sync, which holds writers back and
            # keeps memory bounded.
            self._sync_files([(file, opened)], (), failures)
            if failures:
                raise failures[0]
            self.secure(folder, place.folders)

    def changed(self, folder: int, folders: _Path) -> None:
        """Record an open folder that lost an entry.

        Raises:
            OSError: it could not be recorded, and syncing it immediately failed.
        """
        if not self.active:
            return
        with self._lock:
            pending, home, _ = self._ledger_of(folder)
            remembered = True
            for way in _all_ways(folders):  # any of them may be removed now that it is empty
                remembered &= _remember(pending, pending.folders, way, None, home)
        if not remembered:
            self.secure(folder, folders)

    def made(self, directory: Path) -> None:
        """Record a directory above the root in which another was created."""
        if self.active:
            with self._lock:
                self._above_root.add(directory)

    def secure(self, folder: int, folders: _Path) -> None:
        """Make the entries of an open folder, and of its parents, durable now.

        Raises:
            OSError: they may be lost in a power cut.
        """
        if not self.active:
            return
        entered: dict[_Path, _Entered] = {}
        with self._lock:
            _, home, inode = self._ledger_of(folder)
            ways = self._ways(folder, inode, folders, home, entered)
        # Opened anew: a failure that this reports must stay to be reported by the next sync.
        for way, _ in ways:
            self._sync_folder(way)
        self._sync_above_root()
        self._remember_entered(entered)

    def sync(self) -> None:
        """Make durable everything recorded before the call.

        Raises:
            StorageError: some of it is lost. Every later call raises this again, because the system
                reports a failed write once and then drops the bytes.
            OSError: a transient failure; nothing was dropped from the ledger.
        """
        if self.active:
            self._sync(())

    def _sync(self, also: Iterable[Callable[[], None]]) -> None:
        """Make durable what is recorded, and call ``also`` beside it; errors as `sync`."""
        # One at a time: a caller that finds nothing pending must not return before the one syncing
        # it.
        with self._syncing:
            if self._lost is None:
                with self._lock:
                    home, at_home, elsewhere = (
                        self._home,
                        self._at_home.take(),
                        self._elsewhere.take(),
                    )
                try:
                    self._make_durable(home, at_home, elsewhere, also)
                    self._remember_entered(at_home.entered)
                except _LostWriteError as error:
                    # The pages count as clean now, so that a second sync would succeed without
                    # them. What was taken is not given back: nothing could make it durable.
                    self._lost = str(error)
                except BaseException:
                    with self._lock:
                        self._at_home.give_back(at_home)
                        self._elsewhere.give_back(elsewhere)
                    raise
            if self._lost is not None:
                raise StorageError(
                    f"Could not make writes below {self._tree.path(())!r} durable: {self._lost}. "
                    "What this handle wrote may be lost: look into the system log, open the "
                    "storage again, and write again."
                )

    def close(self) -> None:
        """Close the directories that are held open, and end the threads."""
        # The caller has synced before: what is still recorded was reported as lost.
        self._helpers.close()
        with self._lock:
            home, self._home = self._home, None
            self._at_home, self._entered = _Pending(), {}
        if home is not None:
            os.close(home.directory)

    def sync_with(self, fd: int) -> None:
        """Make durable an open file that has no name yet, and everything recorded before.

        All of it goes out together, which takes little more than one of them: on a slow device a
        commit waits once for what it refers to, and once for the name of the reference.

        Raises:
            StorageError, OSError: as `sync`, also for the open file.
        """
        # The order among these does not matter for a crash, since the file has no name. For an
        # error it does: the ledger's is raised before the file could become a reference to what
        # was lost.
        begin_writing_out(fd)
        failures: list[OSError] = []

        def flush_it() -> None:
            try:
                flush(fd)
            except OSError as error:  # not the ledger's: who wrote the file is told
                failures.append(error)

        self._sync([flush_it])
        if failures:
            raise failures[0]

    def _ledger_of(self, folder: int) -> tuple[_Pending, _Home | None, int]:
        """Return where writes to an open folder are recorded, their home, and its inode."""
        found = os.fstat(folder)
        if self._home is None:
            # A copy of the descriptor: the caller closes its own.
            self._home = _Home(found.st_dev, os.dup(folder), at_once=can_sync_at_once(folder))
        if found.st_dev == self._home.device:
            return self._at_home, self._home, found.st_ino
        return self._elsewhere, None, found.st_ino

    def _ways(
        self,
        folder: int,
        inode: int,
        folders: _Path,
        home: _Home | None,
        entered: dict[_Path, _Entered],
    ) -> Iterable[tuple[_Path, OpenFolder | None]]:
        """Return the folders whose entries lead to a file in an open folder, and may be new.

        With the folder itself, if it is held open.

        A file is found by the entries of all folders above it. Who made those may have died before
        it synced them. So they are synced once, and again if another folder has the name.
        ``entered`` gets the folder if durable entries lead to it once those are synced.
        """
        # On other file systems the number of a folder that is held open may be given to another.
        if home is None or not home.at_once:
            return [(way, None) for way in _all_ways(folders)]
        known = self._entered.get(folders)
        if known is not None and known.inode == inode:
            return ((folders, known.folder),)
        if not folders:
            return ((folders, None),)
        held = entered.get(folders)
        if (held is None or held.inode != inode) and len(entered) < _MOST_ENTERED:
            entered[folders] = _Entered(inode, OpenFolder(os.dup(folder)))
        return [(way, None) for way in _all_ways(folders)]

    def _remember_entered(self, entered: dict[_Path, _Entered]) -> None:
        """Note that durable entries lead to some folders."""
        if entered:
            with self._lock:
                # Each holds a descriptor of the process open.
                if len(self._entered) + len(entered) > _MOST_ENTERED:
                    self._entered = {}
                self._entered |= entered

    def _make_durable(
        self,
        home: _Home | None,
        at_home: _Pending,
        elsewhere: _Pending,
        also: Iterable[Callable[[], None]],
    ) -> None:
        files: dict[_Path, OpenFile | None] = {}
        ways: dict[_Path, OpenFolder | None] = {}
        for pending in (at_home, elsewhere):
            many = pending.uncounted or len(pending.files) + len(pending.folders) > FEW
            # Not for other file systems than the first: of those no descriptor was opened before
            # the writes, and one that is opened now would not report what failed since.
            if many and pending is at_home and home is not None and home.at_once:
                try:
                    _or_lost(sync_file_system, home.directory)
                except _LostWriteError as error:
                    if pending.uncounted or error.errno not in _NO_SYNCFS:
                        raise
                    home.at_once = False  # a sandbox; what is remembered can be synced one by one
                else:
                    continue
            files |= pending.files
            ways |= pending.folders
        work: list[Callable[[], None]] = [*also]
        work += [partial(self._sync_folder, way, opened) for way, opened in ways.items()]
        if self._above_root or at_home.folders or at_home.uncounted or elsewhere.folders:
            work.append(self._sync_above_root)
        failures: list[OSError] = []
        try:
            groups = list(batched(files.items(), FEW)) or [()]
            for some in groups[:-1]:
                self._sync_files(some, (), failures)
            self._sync_files(groups[-1], work, failures)
        finally:  # a loss is reported once only; other errors can be reported again
            for lost in (it for it in failures if isinstance(it, _LostWriteError)):
                raise lost
        if failures:
            raise failures[0]

    def _sync_files(
        self,
        files: Iterable[tuple[_Path, OpenFile | None]],
        more: Iterable[Callable[[], None]],
        failures: list[OSError],
    ) -> None:
        """Start writing out all of the files, then wait for each, and for other syncs.

        So their bytes go out together, and the wait for the first one (usually for a shared entry
        of the journal) serves the others.
        """
        with ExitStack() as again:
            work: list[Callable[[], None]] = []
            for file, opened in files:
                try:
                    fd = self._open_written(file) if opened is None else opened.descriptor
                except OSError as error:
                    failures.append(error)
                    continue
                if fd is None:
                    continue
                if opened is None:
                    again.callback(os.close, fd)
                begin_writing_out(fd)
                work.append(partial(_or_lost, flush, fd))
            self._each([*work, *more], failures)

    def _each(self, work: Iterable[Callable[[], None]], failures: list[OSError]) -> None:
        """Sync one after another where that is quick, else all in parallel."""
        waiting = deque(work)

        def next_one() -> None:
            try:
                sync = waiting.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                sync()
            except OSError as error:
                failures.append(error)

        def share() -> None:
            while waiting:
                next_one()

        # On a device that syncs within microseconds, waking threads takes longer than the syncs.
        while waiting and not self._is_slow:
            began = time.monotonic()
            next_one()
            self._is_slow = time.monotonic() - began > self.slow_seconds
        if not waiting:
            return
        began = time.monotonic()
        self._helpers.share(share, len(waiting) - 1)
        self._is_slow = time.monotonic() - began > self.slow_seconds

    def _open_written(self, file: _Path) -> int | None:
        """Open a file to sync it; None if it was deleted since."""
        try:
            # Not to wait for the other end, should somebody have put a pipe in this place.
            return self._tree.open_file(file[:-1], file[-1], os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def _sync_folder(self, folders: _Path, opened: OpenFolder | None = None) -> None:
        if opened is not None:
            _sync_entries(opened.descriptor)
            return
        try:
            fd = self._tree.open_folder(folders, to_list=True)
        except OSError as error:
            if error.errno in _GONE:
                return  # removed since
            raise
        _sync_directory(fd)

    def _sync_above_root(self) -> None:
        with self._lock:
            above = set(self._above_root)
        for directory in above:
            with suppress(FileNotFoundError, NotADirectoryError):  # removed since, with all in it
                _sync_directory(os.open(directory, os.O_RDONLY))
        with self._lock:
            self._above_root -= above
        if not self._root_entered:
            # The process that created the root may have died before its sync, so every handle that
            # writes syncs its entry once. A parent that may not be read is skipped, and one that
            # was removed has no entries.
            with suppress(PermissionError, FileNotFoundError, NotADirectoryError):
                with self._tree.folder(()) as root:
                    parent = os.open("..", os.O_RDONLY, dir_fd=root)
                _sync_directory(parent)
            self._root_entered = True


def _all_ways(folders: _Path) -> list[_Path]:
    """Return a folder and all above it, up to the root."""
    return [folders[:depth] for depth in range(len(folders), -1, -1)]


def _add[T](group: dict[_Path, T | None], entry: _Path, opened: T | None) -> None:
    """Record one entry, with what is open."""
    # Two threads may record a name in another order than they gave it away. So if it was given
    # twice, what has it is found out at the sync.
    group[entry] = opened if group.get(entry, opened) is opened else None


def _remember[T](
    pending: _Pending,
    group: dict[_Path, T | None],
    entry: _Path,
    opened: T | None,
    home: _Home | None,
) -> bool:
    """Record one entry, or that there are too many; False if neither would get it synced."""
    if pending.uncounted:
        return True
    if entry in group or len(group) < MOST_REMEMBERED:
        _add(group, entry, opened)
        return True
    if home is not None and home.at_once:
        # From here on everything goes out with one call, which needs no names.
        pending.files.clear()
        pending.folders.clear()
        pending.uncounted = True
        return True
    return False


def _sync_directory(fd: int) -> None:
    """Make the entries of an open directory durable, and close it."""
    try:
        _sync_entries(fd)
    finally:
        os.close(fd)


def _sync_entries(fd: int) -> None:
    """Make the entries of an open directory durable."""
    try:
        _or_lost(flush, fd)
    except OSError as error:
        if error.errno not in _NOTHING_TO_SYNC:
            raise


def _or_lost(sync: Callable[[int], None], fd: int) -> None:
    try:
        sync(fd)
    except OSError as error:
        # For every error number: Linux reports a failed write to each descriptor once, and forgets
        # the bytes. No later success of a sync may be believed.
        raise _LostWriteError(error.errno, error.strerror) from error


def flush(fd: int) -> None:
    """Make an open file or directory durable.

    Raises:
        OSError: the device did not take all of it.
    """
    if sys.platform == "darwin":
        with suppress(OSError):  # fsync there stops at the drive's cache
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)
