"""From what file systems raise to the errors of the contract.

Their texts are not passed on: they may hold signed URLs or passwords.
"""

from __future__ import annotations

import errno
from typing import Final

from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UnreachableError,
)

__all__ = ["translate"]

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def translate(
    error: BaseException, operation: str, key: str, *, writes: bool = False
) -> IcechunkError:
    """Return the error that says what was asked, what was found and what to do.

    Where ``writes``, a failure that may hide a success is an ``OutcomeUnknownError``.
    """
    asked = f"Could not {operation} {key!r}"
    match error:
        case IcechunkError():
            return error
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError() if not writes:
            return ObjectNotFoundError(f"There is no object {key!r}.", key=key)
        case PermissionError():
            return PermissionDeniedError(
                f"{asked}: the file system refuses. Check the credentials and what they allow.",
                key=key,
            )
        case OSError(errno=number) if number in _FULL:
            return StorageFullError(f"{asked}: there is no room left. Make some.", key=key)
        case NotImplementedError() | NotADirectoryError() | IsADirectoryError():
            return StorageError(
                f"{asked}: the file system cannot do that. Use another one, or another key.",
                key=key,
            )
        case _ if writes:
            return OutcomeUnknownError(
                f"{asked}: it failed with {type(error).__name__}, and may have landed. Read it "
                "back before writing again.",
                key=key,
            )
        case ConnectionError():
            return UnreachableError(
                f"{asked}: no connection. Check the host, and the network between.", key=key
            )
        case TimeoutError():
            return StorageUnavailableError(f"{asked}: no answer in time. Try again.", key=key)
        case _:
            return StorageError(
                f"{asked}: the file system failed with {type(error).__name__}. Check its options.",
                key=key,
            )
