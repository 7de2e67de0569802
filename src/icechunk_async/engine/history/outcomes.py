"""Conditional writes whose reply may be lost, and how reading back settles them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
)
from icechunk_async.storage import ABSENT

if TYPE_CHECKING:
    from types import TracebackType

    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = ["Doubt", "create_object", "read_if_there"]


class Doubt:
    """The tries of one change: while an earlier try is in doubt, so is the whole change.

    As a ``with`` block it replaces every error of the library by that of the try in doubt.
    Otherwise a later try that is refused would say that nothing happened, although the earlier
    one may still land.
    """

    def __init__(self, error: OutcomeUnknownError | None = None) -> None:
        """Begin without doubt, or with the error of a write just made."""
        self.error = error
        self._expected: Version | None = None

    def begin(self, error: OutcomeUnknownError, expected: Version) -> None:
        """Remember a write of unknown outcome, and the version that it expects to replace."""
        self.error, self._expected = error, expected

    def settle(self, version: Version | None) -> None:
        """End the doubt if the object's version is not the expected one (None: it is gone).

        Call it once the write is known not to be part of that state: it can no longer land.
        """
        # A conditional write lands only on the version that it names, so once that is gone the
        # write is refused whenever it arrives.
        if version != self._expected:
            self.error = self._expected = None

    def __enter__(self) -> Self:
        """Begin the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise the error of the try in doubt instead of any other."""
        doubted = self.error
        # Only errors of the library: a cancellation or an interrupt must reach whom it is for.
        if doubted is not None and isinstance(error, IcechunkError) and error is not doubted:
            raise doubted from error


async def read_if_there(storage: Storage, key: str) -> Retrieved | None:
    """Read an object; return None if it does not exist."""
    try:
        return await storage.get(key)
    except ObjectNotFoundError:
        return None


async def create_object(storage: Storage, key: str, data: bytes) -> Version | None:
    """Create an object; return its version, or None if the key was taken.

    A lost reply is settled by reading back: if the object holds what was written, it is ours, or
    as good as ours.

    Raises:
        OutcomeUnknownError: neither the write nor the reading back was answered.
    """
    try:
        return await storage.put(key, data, if_version=ABSENT)
    except PreconditionFailedError:
        return None
    except OutcomeUnknownError as error:
        # A failure to read back says nothing about the write, so it must not take the place of the
        # doubt.
        with Doubt(error):
            found = await read_if_there(storage, key)
            if found is None or bytes(found.data) != data:
                raise
            return found.version
