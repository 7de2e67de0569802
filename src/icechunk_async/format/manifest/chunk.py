"""One reference to a chunk, as a value; `refs` has the columns of many.

Who looks up or writes a few chunks needs only these.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from icechunk_async.format.ids import ChunkId

__all__ = [
    "ChunkRef",
    "Coordinates",
    "Extents",
    "InlineChunk",
    "Kind",
    "NativeChunk",
    "VirtualChunk",
]

type Coordinates = tuple[int, ...]
"""Where a chunk is in its array's grid, one number an axis."""
type Extents = tuple[tuple[int, int], ...]
"""A box of the chunk grid: ``(start, stop)`` along each axis, half-open."""


class Kind(IntEnum):
    """Where a chunk's bytes are."""

    INLINE = 0
    NATIVE = 1
    VIRTUAL = 2
    DELETED = 3
    """In a session: the chunk was deleted. Never stored."""


@dataclass(frozen=True, slots=True)
class InlineChunk:
    """The bytes themselves."""

    data: bytes | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class NativeChunk:
    """Bytes ``[offset, offset + length)`` of a chunk object of the repository."""

    chunk_id: ChunkId
    offset: int
    length: int
    sum: int = field(default=0, compare=False)
    """The code of the checksum of these bytes, see `format.crc`; 0 if it is unknown."""


@dataclass(frozen=True, slots=True)
class VirtualChunk:
    """Bytes ``[offset, offset + length)`` of an object outside the repository.

    At most one of ``etag`` and ``last_modified`` guards against a changed source.
    """

    location: str
    offset: int
    length: int
    etag: str | None = None
    last_modified: int | None = None
    """Seconds since the epoch: the source must not be newer."""
    seconds_cut: bool = field(default=False, compare=False)
    """Whether the time may have been rounded down, as other writers do; ours is rounded up."""


type ChunkRef = InlineChunk | NativeChunk | VirtualChunk
