"""Which kind of file system a directory is on, and what Linux does there.

Three things cannot be found out by trying: whether a lock on a directory holds on the other
machines that mount it (the Linux clients of NFS, SMB and FUSE keep such locks to themselves),
whether ``syncfs`` reaches the device (FUSE answers without asking), and whether opening a file that
the kernel knows asks another machine or program nevertheless. Kinds that are not listed
here are not trusted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "begin_writing_out",
    "can_sync_at_once",
    "has_common_locks",
    "identity_of",
    "opens_without_requests",
    "sync_file_system",
]

_EXT, _XFS, _BTRFS, _F2FS = 0xEF53, 0x58465342, 0x9123683E, 0xF2F52010
_TMPFS, _RAMFS, _ZFS, _BCACHEFS = 0x01021994, 0x858458F6, 0x2FC12FC1, 0xCA451A4E
_JFS, _NTFS3, _EXFAT, _VFAT = 0x3153464A, 0x7366746E, 0x2011BAB0, 0x4D44
_OVERLAY, _CEPH, _GFS2, _OCFS2 = 0x794C7630, 0x00C36400, 0x01161970, 0x7461636F

_COMMON_LOCKS: Final = frozenset(
    {_EXT, _XFS, _BTRFS, _F2FS, _TMPFS, _RAMFS, _ZFS, _BCACHEFS}
    | {_JFS, _NTFS3, _EXFAT, _VFAT, _OVERLAY, _CEPH, _GFS2, _OCFS2}
)
_SYNCFS: Final = frozenset({_EXT, _XFS, _BTRFS, _F2FS, _TMPFS})
_ON_THIS_MACHINE: Final = frozenset({_EXT, _XFS, _BTRFS, _F2FS, _TMPFS})
_WRITE: Final = 2
"""Of ``sync_file_range``: begin, and wait for nothing."""
_FIRST_WITH_ERRORS: Final = (5, 8)
"""The first Linux whose ``syncfs`` answers failed writes."""


def has_common_locks(directory: int) -> bool:
    """Return whether ``flock`` on a directory holds for everyone who can write there.

    Elsewhere than on Linux the kind is not known and taken to be a local one.
    """
    if sys.platform != "linux":
        return True
    return _kind(directory) in _COMMON_LOCKS


def opens_without_requests(path: Path) -> bool:
    """Return whether what is below a path, which need not exist, is on a disk of this machine."""
    if sys.platform != "linux":
        return False
    while not os.path.lexists(path):
        path = path.parent
    try:
        fd = os.open(path, os.O_PATH)
    except OSError:
        return False
    try:
        return _kind(fd) in _ON_THIS_MACHINE
    finally:
        os.close(fd)


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return what tells the file system of a path on a disk of this machine from all others."""
    if not opens_without_requests(path):
        return None
    return path.stat().st_dev, os.statvfs(path).f_fsid


def can_sync_at_once(directory: int) -> bool:
    """Return whether :func:`sync_file_system` makes everything durable, and says if it failed."""
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
    """Have the system begin to write out an open file, where it can be asked to.

    Nothing is waited for and nothing is promised; whoever syncs later hears of failures.
    """
    if sys.platform == "linux" and hasattr(_libc(), "sync_file_range"):
        offset = ctypes.c_int64(0)
        _libc().sync_file_range(fd, offset, offset, _WRITE)


def _kind(directory: int) -> int | None:
    """Return ``f_type``, the first word of ``struct statfs``; None where it cannot be had."""
    reply = ctypes.create_string_buffer(512)
    if _libc().fstatfs(directory, reply) != 0:
        return None
    return ctypes.c_long.from_buffer(reply).value & 0xFFFFFFFF


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
