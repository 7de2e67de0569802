"""Optional operations of a storage, which save requests, copies or time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np

from icechunk_async.storage.protocol import ByteRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["ByteReads", "FolderListing", "ObjectStates", "PlacedRange", "room"]


_MOST_BYTES: Final = 256 << 20
"""The length of a read is somebody's word: beyond this, memory is used as bytes arrive."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRange(ByteRange):
    """A range with a known end, and where its bytes are wanted. Equal to the range alone.

    A storage may fill ``into`` and answer it as ``Retrieved.data``, if exactly so many bytes come;
    any other storage answers as always. Only one request at a time may fill it, and none after the
    read has returned or was cancelled.
    """

    into: memoryview = field(kw_only=True, repr=False)
    """Writable bytes, as many as the range has."""

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
    """Return memory for so many bytes, which takes none until it is filled; None for too many."""
    return memoryview(np.empty(length, np.uint8)) if length <= _MOST_BYTES else None


@runtime_checkable
class ByteReads(Protocol):
    """Also answers bytes of objects that never change, without the objects' versions.

    An addition to :class:`~icechunk_async.storage.BlockingStorage`. Both methods answer exactly
    the bytes ``[start, stop)`` or None; then the caller asks ``get_blocking`` or ``get``, which
    also tell what is wrong. Callable from any thread, also at the same time.
    """

    def read_bytes(self, key: str, start: int, stop: int) -> bytes | memoryview | None:
        """Return bytes of an object, on this thread."""
        ...

    def read_bytes_at_once(self, key: str, start: int, stop: int) -> bytes | memoryview | None:
        """Return bytes of an object that are in memory; None where that would mean waiting.

        An event loop may call it. None is also the answer after many reads in a row, so that
        others on the loop get their turn with what the caller awaits instead.
        """
        ...


@dataclass(frozen=True, slots=True)
class ObjectStates:
    """What is known of some objects, a row each, in the order in which they were asked for."""

    present: npt.NDArray[np.bool_]
    """Whether there is such an object."""
    sizes_bytes: npt.NDArray[np.int64]
    modified_us: npt.NDArray[np.int64]
    """When each was written, in microseconds since 1970."""


@runtime_checkable
class FolderListing(Protocol):
    """Also lists one folder in no order, where asking for each object's state is what costs.

    An addition to :class:`~icechunk_async.storage.Storage`, whose listings tell the size and the
    time of every object.
    """

    async def list_names(self, folder: str) -> list[str]:
        """Return the names of what is directly in a folder, objects or not; none without it.

        Cancellation: no effect. Memory: the names.
        """
        ...

    async def states(self, folder: str, names: Sequence[str]) -> ObjectStates:
        """Return the states of objects directly in a folder.

        Cancellation: no effect.
        """
        ...
