"""Gathering references that are decoded block by block, with one copy of each column.

Room for all of them is asked for at the start; the system gives it as it is filled. Two threads
fill a part of it each, and the second does not know how many objects and strings the first will
find: that is added to its numbers when both are done.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.format.chunk_refs import ChunkRefs, Kind
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.locations import join_stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.locations import StringPool

    type Column = npt.NDArray[Any]

__all__ = ["Gathered", "Room", "joined"]


class Room:
    """Columns for references of one array and one rank."""

    def __init__(self, rank: int, count: int) -> None:
        """Make room for ``count`` references of ``rank`` axes."""
        self.rank = rank
        self.coords = np.empty((count, rank), np.uint32)
        self.kinds = np.empty(count, np.uint8)
        self.objects = np.empty(count, np.uint32)
        self.offsets = np.zeros(count, np.uint64)  # which take no memory while none is written
        self.lengths = np.empty(count, np.uint64)

    def count_on(self, rows: slice, before: npt.NDArray[np.int64]) -> None:
        """Count the objects of some rows on from so many chunk ids and locations."""
        ids, names = before[:2].astype(np.uint32)
        if ids or names:
            self.objects[rows] += np.where(self.kinds[rows] == Kind.VIRTUAL, names, ids)


class Gathered:
    """What one thread put into a part of the room, in order."""

    def __init__(self, room: Room, first: int) -> None:
        """Begin with nothing, at row ``first``."""
        self.room = room
        self.rows = slice(first, first)
        """Where the references are."""
        self.ids = [np.empty((0, ChunkId.size_bytes), np.uint8)]
        self.locations: list[StringPool] = []
        self.etag_pools: list[StringPool] = []
        self.etags: list[Column] = []
        self.modified: list[Column] = []
        self.inline = memoryview(b"")
        self.counts = np.zeros(3, np.int64)
        """How many chunk ids, locations and ETags there are."""

    def put(self, part: ChunkRefs) -> None:
        """Copy references, all of one file, behind those that are here."""
        room, rows = self.room, slice(self.rows.stop, self.rows.stop + len(part))
        room.coords[rows] = part.coords
        room.kinds[rows] = part.kinds
        if part.offsets.any():
            room.offsets[rows] = part.offsets
        room.lengths[rows] = part.lengths
        room.objects[rows] = part.objects
        self.rows = slice(self.rows.start, rows.stop)
        room.count_on(rows, self.counts)
        self.etags.append(_moved(part.etags, int(self.counts[2])))
        self.modified.append(part.modified)
        self.ids.append(part.chunk_ids)
        self.locations.append(part.locations)
        self.etag_pools.append(part.etag_pool)
        self.counts += [len(part.chunk_ids), len(part.locations), len(part.etag_pool)]
        self.inline = max(self.inline, part.inline, key=len)  # all of the file, or nothing


def joined(some: Sequence[Gathered]) -> ChunkRefs | None:
    """Answer the references in parts of one room, in order; None if nothing was put there."""
    before = np.zeros(3, np.int64)
    etags: list[Column] = []
    for it in some:
        it.room.count_on(it.rows, before)
        etags += [_moved(column, int(before[2])) for column in it.etags]
        before += it.counts
    if not etags:
        return None
    room = some[0].room
    rows = [it.rows for it in some if it.rows.start < it.rows.stop]
    return ChunkRefs.build(
        _of_rows(room.coords, rows),
        _of_rows(room.kinds, rows),
        objects=_of_rows(room.objects, rows),
        offsets=_of_rows(room.offsets, rows),
        lengths=_of_rows(room.lengths, rows),
        etags=_concatenated(etags),
        modified=_concatenated([column for it in some for column in it.modified]),
        chunk_ids=np.concatenate([ids for it in some for ids in it.ids]),
        locations=join_stored([pool for it in some for pool in it.locations]),
        etag_pool=join_stored([pool for it in some for pool in it.etag_pools]),
        inline=max((it.inline for it in some), key=len),
    )


def _of_rows(column: Column, rows: Sequence[slice]) -> Column:
    """Answer rows of a column; a view of it where they are most of it, with nothing between."""
    if not rows:
        return column[:0]
    start, stop = rows[0].start, rows[-1].stop
    if 2 * (stop - start) < len(column) or any(a.stop != b.start for a, b in pairwise(rows)):
        return np.concatenate([column[it] for it in rows])
    return column[start:stop]


def _concatenated(columns: list[Column]) -> Column:
    """Join pieces of a column; one value for all rows goes on taking no memory."""
    first = columns[0]
    if all(it.strides == (0,) and it[0] == first[0] for it in columns):
        return np.broadcast_to(first[0], sum(map(len, columns)))
    return np.concatenate(columns)


def _moved(etags: Column, base: int) -> Column:
    """Count ETags on from ``base``; rows without one keep a negative number."""
    if base == 0 or etags.strides == (0,):  # then no row has one
        return etags
    return np.where(etags >= 0, etags + np.int32(base), etags)
