"""File systems: identity, locks, and a trial of the promises of a directory.

Promises cannot be read off a file system's name alone (the same NFS export may or may not pass
locks on), so a directory is tried when it is opened.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from icechunk_async.errors import InvalidURLError, StorageUnavailableError
from icechunk_async.storage import Capabilities
from icechunk_async_local.paths import RESERVED_PREFIX
from icechunk_async_local.versions import any_below, disk_time_us

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = [
    "Abilities",
    "begin_writing_out",
    "can_sync_at_once",
    "has_common_locks",
    "identity_of",
    "is_on_this_machine",
    "locked",
    "may_write",
    "opens_without_requests",
    "probe",
    "remove_abandoned",
    "sync_file_system",
    "try_lock",
    "unlock",
]

_EXT, _XFS, _BTRFS, _F2FS = 0xEF53, 0x58465342, 0x9123683E, 0xF2F52010
_TMPFS, _RAMFS, _ZFS, _BCACHEFS = 0x01021994, 0x858458F6, 0x2FC12FC1, 0xCA451A4E
_JFS, _NTFS3, _EXFAT, _VFAT = 0x3153464A, 0x7366746E, 0x2011BAB0, 0x4D44
_OVERLAY, _CEPH, _GFS2, _OCFS2 = 0x794C7630, 0x00C36400, 0x01161970, 0x7461636F

# NFS is not here: its `flock` may hold on one machine only (`local_lock`), or be passed on, and no
# trial shows which. Kinds that are not listed are treated like it.
_COMMON_LOCKS: Final = frozenset(
    {_EXT, _XFS, _BTRFS, _F2FS, _TMPFS, _RAMFS, _ZFS, _BCACHEFS}
    | {_JFS, _NTFS3, _EXFAT, _VFAT, _OVERLAY, _CEPH, _GFS2, _OCFS2}
)
# Kinds that are known to wait for the device in ``syncfs`` and to report failed writes there; on
# others each file is synced.
_SYNCFS: Final = frozenset({_EXT, _XFS, _BTRFS, _F2FS, _TMPFS})
# Without overlays, whose lower layers may lie on a network.
_ON_THIS_MACHINE: Final = frozenset({_EXT, _XFS, _BTRFS, _F2FS, _TMPFS})
_WRITE: Final = 2
"""Of ``sync_file_range``: begin, and wait for nothing."""
_FIRST_WITH_ERRORS: Final = (5, 8)
"""The first Linux whose ``syncfs`` reports failed writes."""


def has_common_locks(directory: int) -> bool:
    """Return whether ``flock`` on a directory holds for everyone who can write there.

    Elsewhere than on Linux the kind is not known and taken to be a local one.
    """
    if sys.platform != "linux":
        return True
    return _kind(directory) in _COMMON_LOCKS


def opens_without_requests(path: Path) -> bool:
    """Return whether a path, which need not exist, is on a disk of this machine."""
    if sys.platform != "linux":
        return False
    while not os.path.lexists(path):
        path = path.parent
    try:
        fd = os.open(path, os.O_PATH)  # needs no permission to read it
    except OSError:
        return False
    try:
        return is_on_this_machine(fd)
    finally:
        os.close(fd)


def is_on_this_machine(directory: int) -> bool:
    """Return whether an open directory is on a disk of this machine."""
    return _kind(directory) in _ON_THIS_MACHINE


def may_write(directory: int) -> bool:
    """Return whether this user may make files in an open directory of this machine.

    Unlike ``os.access`` it looks up no path, and so never waits for a disk.
    """
    allowed: int = _libc().faccessat(directory, b".", os.W_OK | os.X_OK, 0)
    return allowed == 0


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return the identity of the file system of a path; None unless on a disk of this machine."""
    if not opens_without_requests(path):
        return None
    return path.stat().st_dev, os.statvfs(path).f_fsid


def can_sync_at_once(directory: int) -> bool:
    """Return whether `sync_file_system` makes everything durable, and says if it failed."""
    if sys.platform != "linux" or not hasattr(_libc(), "syncfs"):
        return False
    release = platform.release().split(".")
    try:
        recent = (int(release[0]), int(release[1])) >= _FIRST_WITH_ERRORS
    except (IndexError, ValueError):
        return False
    return recent and _kind(directory) in _SYNCFS


def sync_file_system(directory: int) -> None:
    """Write out all that waits in memory for the file system of an open directory.

    Raises:
        OSError: the device failed, now or since the directory was opened.
    """
    libc = _libc()
    while libc.syncfs(directory) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def begin_writing_out(fd: int) -> None:
    """Start writing out an open file, if the system supports it.

    It neither waits nor promises anything; a later sync reports failures.
    """
    if sys.platform == "linux" and hasattr(_libc(), "sync_file_range"):
        offset = ctypes.c_int64(0)
        _libc().sync_file_range(fd, offset, offset, _WRITE)


def _kind(directory: int) -> int | None:
    """Return ``f_type``, the first word of ``struct statfs``; None if it is unavailable."""
    # Larger than the structure of any architecture (120 bytes on x86-64): the kernel writes past a
    # buffer that is too small.
    reply = ctypes.create_string_buffer(512)
    if _libc().fstatfs(directory, reply) != 0:
        return None
    return ctypes.c_long.from_buffer(reply).value & 0xFFFFFFFF


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


_FIRST_PAUSE_SECONDS: Final = 50e-6
_LONGEST_PAUSE_SECONDS: Final = 0.001
"""A lock is held for a fraction of that, and who waits for long should not be the last to look."""


def try_lock(directory: int, *, exclusive: bool) -> bool:
    """Try to lock an open directory without waiting.

    Raises:
        OSError: the file system has no locks.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    try:
        fcntl.flock(directory, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(directory: int) -> None:
    """Release the lock.

    Closing the descriptor is not enough: a child process forked at this moment holds a copy until
    it starts its program.
    """
    if sys.platform != "win32":
        fcntl.flock(directory, fcntl.LOCK_UN)


@contextmanager
def locked(
    directory: int, path: Callable[[], str], *, exclusive: bool, timeout_seconds: float
) -> Generator[None]:
    """Hold the lock of an open directory, shared or exclusive.

    Args:
        directory: an open directory.
        path: returns its path, for a message.
        exclusive: exclude all others; a shared lock excludes only exclusive ones.
        timeout_seconds: maximum wait.

    Raises:
        StorageUnavailableError: others held it all the time.
    """
    # `flock` cannot wait for a limited time, and a thread that waits in the kernel cannot be
    # cancelled: so it is tried over and over. It is held for a rename, as a rule.
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while not try_lock(directory, exclusive=exclusive):
        if time.monotonic() >= deadline:
            raise StorageUnavailableError(
                f"Another writer has held the lock on {path()!r} for {timeout_seconds:g} s"
                f"{_holders(directory)}. Look for a stopped or hanging process, end it (that "
                "frees the lock), then try again.",
                path=path(),
            )
        # Jitter, so that writers who collided do not collide again.
        time.sleep(pause * (0.5 + any_below(1000) / 1000))
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
    try:
        yield
    finally:
        unlock(directory)


def _holders(directory: int) -> str:
    """Name the processes that hold the lock, if the system lists them."""
    inode = os.fstat(directory).st_ino
    try:
        table = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    # Lines look like ``1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF``: the process, then device
    # and inode. Of other containers the process may be 0 or missing.
    lines = [line.split() for line in table.splitlines()]
    found = {
        fields[4]
        for fields in lines
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode)
    }
    return f" (process {', '.join(sorted(found))})" if found else ""


_RESERVED: Final = RESERVED_PREFIX.decode()
_ABANDONED_AFTER_SECONDS: Final = 24 * 60 * 60
_MOST_LOOKED_AT: Final = 1000
_ODD_TIME_NS: Final = 1_000_000_123_457_000  # 2001, with microseconds

_ONE_MACHINE: Final = (
    "If no other machine ever writes here, open it with single_machine=True; otherwise keep the "
    "repository on a local disk or in a bucket"
)

_fine: Final[set[tuple[int, int]]] = set()
"""File systems where every trial succeeded."""


class Abilities(NamedTuple):
    """The operations that work in a directory."""

    links: bool
    """A hard link is created in one step, and fails if the name is taken."""
    locks: bool
    """A directory can be locked against every other writer."""
    exact_times: bool
    """Files keep the microseconds of their times."""


class _Findings(NamedTuple):
    links: str | None = None
    locks: str | None = None
    times: str | None = None


def probe(
    url: str, root: Path, *, single_machine: bool, read_only: bool = False
) -> tuple[Abilities, Capabilities]:
    """Try the promises of a directory in a temporary folder.

    A root that does not exist is not created: looking for a repository must leave no trace. Its
    nearest existing parent, which is on the same file system, is tried instead.

    Raises:
        InvalidURLError: the path is not a directory.
    """
    place = root
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise InvalidURLError(
            f"{url!r} cannot be opened: {str(place)!r} is not a directory. Give the path "
            "of a directory, or of one to be made.",
            url=url,
        )
    if read_only:
        return _no_writes("it was opened with read_only=True. Open it without, to write")
    if not os.access(place, os.W_OK | os.X_OK):
        return _read_only(place, "this user may not write there, or it is mounted read-only")
    try:
        # Trials write, and repositories are opened often: a file system that kept every promise
        # once is believed for as long as the process lives. One that did not is tried again.
        identity = identity_of(place)
        if identity is not None and identity in _fine:
            found = _Findings()
        else:
            found = _try_in(place, single_machine=single_machine)
            if identity is not None and found == _Findings():
                _fine.add(identity)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _read_only(place, f"a trial failed with: {error.strerror}")
        if opens_without_requests(place):
            found = _Findings()  # these kinds keep every promise; and garbage makes room
        else:
            full = "the disk is full, so it could not be tried. Make room and open it again"
            found = _Findings(full, full, full)
    abilities = Abilities(found.links is None, found.locks is None, found.times is None)
    return abilities, _capabilities(found)


def remove_abandoned(root: Path) -> None:
    """Remove unfinished files directly below the root that are a day old, if it has few entries.

    Those of killed writers in other folders stay until garbage is collected, because finding them
    requires listing every chunk. No listing shows them.
    """
    with suppress(OSError), os.scandir(root) as entries:
        found = [it for it in islice(entries, _MOST_LOOKED_AT) if it.name.startswith(_RESERVED)]
        if not found:
            return
        with _opened(root) as fd:
            oldest = disk_time_us(fd) * 1000 - _ABANDONED_AFTER_SECONDS * 10**9
        for entry in found:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime_ns >= oldest:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    _remove_folder(root / entry.name)
                else:
                    (root / entry.name).unlink()


@contextmanager
def _opened(directory: Path) -> Generator[int]:
    fd = os.open(directory, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _capabilities(found: _Findings) -> Capabilities:
    reasons: dict[str, str] = {}
    if found.links is not None and found.locks is not None:
        reasons["conditional_create"] = f"{found.links}; and {found.locks}"
    update = found.locks or found.times
    if update is not None:
        reasons["conditional_update"] = update
    return Capabilities(
        conditional_create="conditional_create" not in reasons,
        conditional_update="conditional_update" not in reasons,
        verified=True,
        reasons=reasons,
    )


def _read_only(place: Path, problem: str) -> tuple[Abilities, Capabilities]:
    return _no_writes(f"{str(place)!r} cannot be written: {problem}. Check its mode and its mount")


def _no_writes(reason: str) -> tuple[Abilities, Capabilities]:
    names = ("writable", "conditional_create", "conditional_update")
    return Abilities(links=False, locks=False, exact_times=False), Capabilities(
        writable=False,
        conditional_create=False,
        conditional_update=False,
        reasons=dict.fromkeys(names, reason),
    )


def _try_in(place: Path, *, single_machine: bool) -> _Findings:
    folder = place / f"{_RESERVED}probe-{os.urandom(8).hex()}"
    # Other users must not be able to put a file of theirs into the trial.
    folder.mkdir(0o700)
    try:
        first = folder / "first"
        first.touch(0o600, exist_ok=False)
        return _Findings(
            links=_try_links(first, folder / "second"),
            times=_try_times(first),
            locks=_try_locks(folder, single_machine=single_machine),
        )
    finally:
        _remove_folder(folder)


def _try_links(first: Path, second: Path) -> str | None:
    try:
        os.link(first, second, follow_symlinks=False)
    except (OSError, NotImplementedError) as error:
        return f"the file system makes no hard links ({error}). Use another file system"
    with suppress(FileExistsError):
        os.link(first, second, follow_symlinks=False)
        return "the file system links over existing files. Use another file system"
    return None


def _try_times(first: Path) -> str | None:
    os.utime(first, ns=(_ODD_TIME_NS, _ODD_TIME_NS))
    if first.stat().st_mtime_ns == _ODD_TIME_NS:
        return None
    return (
        "the file system does not keep the microseconds of a file's time, so that two states of "
        "an object could not be told apart. Use another file system"
    )


def _try_locks(folder: Path, *, single_machine: bool) -> str | None:
    one = os.open(folder, os.O_RDONLY)
    try:
        other = os.open(folder, os.O_RDONLY)
        try:
            # Two descriptors of one process exclude one another as two processes do: the lock
            # belongs to the open file, not to the process.
            taken = try_lock(one, exclusive=True)
            kept_out = taken and not try_lock(other, exclusive=True)
            unlock(one)
            common = single_machine or has_common_locks(one)
        finally:
            os.close(other)
    except (OSError, NotImplementedError) as error:
        return f"directories cannot be locked here ({error}). Use another file system"
    finally:
        os.close(one)
    if not kept_out:
        return "locks on directories keep nobody out here. Use another file system"
    if not common:
        return (
            "on this kind of file system a lock on a directory may not hold on other machines. "
            + _ONE_MACHINE
        )
    return None


def _remove_folder(folder: Path) -> None:
    with suppress(OSError):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
