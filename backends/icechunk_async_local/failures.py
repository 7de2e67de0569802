"""Translate errors of the operating system to errors of the storage contract."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import (
    InvalidObjectKeyError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from icechunk_async.errors import IcechunkError

__all__ = ["MISSING", "explain", "missing", "refuse_link"]

# ENOTDIR: a file stands where the key has a folder. ENXIO: a socket has the object's name, and
# opening one fails like this.
MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENXIO})
"""Errors on the way to an object that mean it does not exist."""

_DENIED: Final = "Check the owner and the mode of the directory, and how it is mounted"
_BUSY: Final = "Try again"
_NAMING: Final = "Use another name"

_TABLE: Final[dict[int, tuple[type[IcechunkError], str]]] = {
    errno.ENOENT: (ObjectNotFoundError, "Check the name"),
    errno.ENOTDIR: (InvalidObjectKeyError, "A file stands where a folder is needed. " + _NAMING),
    errno.EISDIR: (InvalidObjectKeyError, "A folder has this name already. " + _NAMING),
    errno.ENAMETOOLONG: (InvalidObjectKeyError, "The name is too long for this file system"),
    errno.EILSEQ: (InvalidObjectKeyError, "This file system cannot spell the name"),
    errno.ENOSPC: (StorageFullError, "Make room, then try again"),
    errno.EDQUOT: (StorageFullError, "Make room or raise the quota, then try again"),
    errno.EACCES: (PermissionDeniedError, _DENIED),
    errno.EPERM: (PermissionDeniedError, _DENIED),
    errno.EROFS: (PermissionDeniedError, "The file system is mounted read-only"),
    # O_NOFOLLOW reports a link by this number.
    errno.ELOOP: (PermissionDeniedError, "Symbolic links below the root are not followed"),
    # Tries again help for these and for those below: descriptors, memory, locks and servers come
    # back.
    errno.EMFILE: (
        StorageUnavailableError,
        "This process has too many open files: close some, or raise 'ulimit -n'",
    ),
    errno.ENFILE: (StorageUnavailableError, "The machine has too many open files. " + _BUSY),
    errno.ENOMEM: (StorageUnavailableError, "The machine is short of memory. " + _BUSY),
    **dict.fromkeys(
        (
            errno.EAGAIN,
            errno.EBUSY,
            errno.EINTR,
            errno.ENOLCK,
            errno.ESTALE,
            errno.ETIMEDOUT,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ENETDOWN,
            errno.ENETUNREACH,
        ),
        (StorageUnavailableError, _BUSY),
    ),
    # Not an error that invites another try: after a failed write the system drops the bytes, and a
    # second try may seem to succeed.
    errno.EIO: (
        StorageError,
        "The device or its connection failed: look into the system log before you continue",
    ),
}


def explain(error: OSError, action: str, path: str, *, key: str | None = None) -> IcechunkError:
    """Return the contract's error for a failed system call.

    Args:
        error: the error of the operating system; the caller raises the result from it.
        action: the operation, such as ``"read"``.
        path: the file or directory concerned.
        key: of the object, where there is one.
    """
    # Python raises some errors of this class without a number, such as those of `shutil`.
    number = error.errno or 0
    kind, advice = _TABLE.get(number, (StorageError, "Look into the system log"))
    context: dict[str, object] = {"path": path, "errno": errno.errorcode.get(number, str(number))}
    if key is not None:
        context["key"] = key
    found = error.strerror or type(error).__name__
    return kind(f"Could not {action} {path!r}: {found}. {advice}.", **context)


def missing(key: str) -> ObjectNotFoundError:
    """Return the error for a missing object."""
    return ObjectNotFoundError(f"There is no object {key!r}.", key=key)


def refuse_link(action: str, what: str, link: str) -> PermissionDeniedError:
    """Return the error for a symbolic link between the root and ``what``."""
    return PermissionDeniedError(
        f"Could not {action} {what!r}: {link!r} is a symbolic link, and links below the root are "
        "not followed. Put what it leads to in its place.",
        link=link,
    )
