"""Optional operations of a storage, which save requests, copies or time."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.storage.protocol import ByteRange

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    import numpy as np
    import numpy.typing as npt

    from icechunk_async.storage.protocol import Storage, Version

__all__ = [
    "ByteReads",
    "CopiesFrom",
    "FolderListing",
    "ObjectStates",
    "PlacedRange",
    "QueuesWriters",
    "TellsTime",
    "TellsUnchanged",
    "Unfinished",
    "UnfinishedWrites",
    "WriterNumber",
    "room",
]


_MOST_BYTES: Final = 256 << 20
"""Lengths come from untrusted files: beyond this one, memory is allocated as bytes arrive."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRange(ByteRange):
    """A range with a known end and a buffer for its bytes. Equal to the range alone.

    A storage may fill ``into`` and return it as ``Retrieved.data`` if exactly that number of bytes
    arrives; a storage that does not know this class returns its own buffer. Only one request at a
    time may fill it, and none after the read has returned or was cancelled.
    """

    into: memoryview = field(kw_only=True, repr=False)
    """Writable bytes, as many as the range has."""

    # Requests that are joined are found by equality: where the bytes go must make no difference.
    def __eq__(self, other: object) -> bool:
        """Compare what is asked for."""
        if not isinstance(other, ByteRange):
            return NotImplemented
        return (self.start, self.stop) == (other.start, other.stop)

    __hash__ = ByteRange.__hash__

    def unplaced(self) -> ByteRange:
        """Return the range alone, for a request beside another one."""
        return ByteRange(self.start, self.stop)


def room(length: int) -> memoryview | None:
    """Return memory of ``length`` bytes, allocated lazily by the system; None if it is too long."""
    if length > _MOST_BYTES:
        return None
    import numpy as np  # noqa: PLC0415 -- slow to import

    return memoryview(np.empty(length, np.uint8))


@runtime_checkable
class ByteReads(Protocol):
    """An optional operation: reading bytes of immutable objects without their versions.

    An addition to `BlockingStorage`. Both methods return exactly the bytes ``[start, stop)`` or
    None. After None the caller uses ``get_blocking`` or ``get``, which raise the proper error.
    Callable from any thread, also at the same time.
    """

    def read_bytes(self, key: str, start: int, stop: int) -> bytes | memoryview | None:
        """Return bytes of an object, on this thread."""
        ...

    def read_bytes_at_once(self, key: str, start: int, stop: int) -> bytes | memoryview | None:
        """Return bytes of an object that are in memory; None if the call would block.

        It may be called on an event loop. It also returns None after many reads in a row, so that
        the caller awaits and other tasks get their turn.
        """
        ...


@runtime_checkable
class TellsUnchanged(Protocol):
    """An optional operation: telling without waiting that an object is what it was.

    An addition to `Storage`. Callable from any thread, also at the same time.
    """

    def is_at(self, key: str, version: Version) -> bool:
        """Return whether an object is known to be at a version; after False ask ``get_if_changed``.

        It neither waits nor raises.
        """
        ...


@runtime_checkable
class CopiesFrom(Protocol):
    """An optional operation: copying from another storage without the bytes passing through here.

    An addition to `Storage`, for storages of one service, or of one machine. A storage around such
    a storage does not have it, unless it knows that bytes need no change on their way.
    """

    def copies_from(self, source: Storage) -> bool:
        """Return whether objects of ``source`` can be copied in this way. Nothing is sent.

        The service may still refuse, for example if the credentials of this storage may not read
        the other one.
        """
        ...

    async def copy_from(self, source: Storage, key: str) -> None:
        """Copy an object of another storage to the same key here, replacing any other.

        Only for storages that `copies_from` accepts. The object appears as a whole.

        Raises:
            ObjectNotFoundError: ``source`` has no such object.
            OutcomeUnknownError: no answer came; the copy may exist.
            StorageError: the service cannot copy it; read and write it instead.

        Cancellation: the copy may exist, whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class ObjectStates:
    """The states of several objects as columns, in the order of the request."""

    present: npt.NDArray[np.bool_]
    """Whether there is such an object."""
    sizes_bytes: npt.NDArray[np.int64]
    modified_us: npt.NDArray[np.int64]
    """When each was written, in microseconds since 1970."""


@runtime_checkable
class FolderListing(Protocol):
    """An optional operation: listing the names of one folder without the state of each object.

    An addition to `Storage`, whose listings tell the size and the time of every object.
    """

    async def list_names(self, folder: str) -> list[str]:
        """Return the names directly in a folder, objects or not; empty if there is no such folder.

        Cancellation: no effect. Memory: the names.
        """
        ...

    async def states(self, folder: str, names: Sequence[str]) -> ObjectStates:
        """Return the states of objects directly in a folder.

        Cancellation: no effect.
        """
        ...


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The leftovers of writers that were killed before their object had its name."""

    count: int = 0
    size_bytes: int = 0


@runtime_checkable
class UnfinishedWrites(Protocol):
    """An optional operation: finding what killed writers left, which no listing shows.

    An addition to `Storage`, for those where it stays until somebody removes it.
    """

    async def unfinished(
        self, older_than: datetime | None = None, *, remove: bool = False
    ) -> Unfinished:
        """Count what writers did not finish, or remove it.

        Args:
            older_than: leave alone what was changed at this time or later, by the storage's clock.
                A writer whose unfinished object is removed writes it once more.
            remove: remove it. What cannot be removed is not counted then.

        Raises:
            StorageError: it could not be looked for.

        Cancellation: some of it may be removed. Cost: all folders are listed.
        """
        ...


@runtime_checkable
class TellsTime(Protocol):
    """An optional operation: reading the clock by which objects are dated, without writing one.

    An addition to `Storage`. A full disk can still tell the time.
    """

    async def current_time(self) -> datetime:
        """Return the time that an object written now would have, up to the clock's coarseness.

        Raises:
            StorageError: it cannot be told; an object that is written tells it.

        Cancellation: no effect.
        """
        ...


class WriterNumber(Protocol):
    """A place in a queue of writers, of all processes that use the storage.

    Its methods neither wait nor send anything, so an event loop may call them.
    """

    def ahead(self) -> list[int]:
        """Return the numbers of earlier writers that are not done, in order.

        Of very many, some may be left out, but never the first.
        """
        ...

    def overlook(self, number: int) -> None:
        """Ignore a writer that gives no sign of life, from now on, for all users of the handle."""
        ...

    def give_back(self) -> None:
        """Leave the queue; again does nothing."""
        ...


@runtime_checkable
class QueuesWriters(Protocol):
    """An optional operation: letting writers of several processes publish one after another.

    An addition to `Storage`, for those where writers can see each other without requests. The queue
    makes waiting fair and saves tries that would fail. Writers may ignore it: what keeps commits
    safe is ``put(if_version=...)``. A process that ends in any way is in no queue any more.
    """

    def take_number(self, line: str) -> WriterNumber | None:
        """Join the queue of this name, without waiting; None if that is not possible now."""
        ...
