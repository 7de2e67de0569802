"""Manifests that are in memory whole and not decoded: as their file, or decompressed.

Decoding a million references takes a good part of a second, and decoding sixty arrays takes longer
than opening the repository, and many readers want only a few of them, which bisection in the bytes
finds. What it finds is right, since node and coordinates are those asked for. That a chunk does not
exist is certain only once the order of the references was checked, so that is never concluded
without decoding its array.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import cached_property
from struct import Struct, unpack_from
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.format.envelope import FileType, may_cut_seconds, unpack
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.checks import (
    beyond_table,
    lacking,
    misaligned,
    outside,
    pointless,
)
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk
from icechunk_async.format.manifest.held import BYTES_PER_REF, EXPAND

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.held import HeldManifest, Undecided
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs

__all__ = ["ManifestFile", "PackedManifest", "open_manifest"]

_LARGE_BYTES: Final = 1 << 18
"""Arrays in payloads from this size are decoded only once several of their chunks were looked up;
those in smaller ones at the second lookup."""
_PEEKS: Final = 16
"""Lookups by bisection in a large array, after which decoding pays."""
_APART: Final = 8
"""Arrays that are looked at one by one; decoding all takes little longer than that."""
_MAX_SLOTS: Final = 9
"""Fields of the tables of this format."""
_MAX_VTABLES: Final = 64
"""Files have fewer than this number, or a separate one for each table, and none is met again."""
_U16, _U32, _I32, _U64 = Struct("<H"), Struct("<I"), Struct("<i"), Struct("<Q")


def open_manifest(data: bytes | memoryview) -> PackedManifest:
    """Decompress the file of a manifest.

    Raises:
        UnsupportedSpecVersionError, FormatError: the file cannot be read.
    """
    payload = unpack(data, FileType.MANIFEST).payload
    return PackedManifest(payload, seconds_cut=may_cut_seconds(data))


class ManifestFile:
    """The stored file of a manifest, such as one that was just written."""

    is_whole = True
    columns = None

    def __init__(
        self,
        manifest_id: ManifestId,
        data: bytes | memoryview,
        open_file: Callable[[bytes | memoryview], HeldManifest],
    ) -> None:
        """Hold the bytes of the file, which ``open_file`` can open; nothing is looked at."""
        self.id = manifest_id
        self._data = data
        self._open = open_file

    @property
    def weight(self) -> int:
        """As ``HeldManifest``."""
        return 1 + len(self._data) // BYTES_PER_REF

    def lookup(self, node_id: NodeId, coords: Coordinates) -> Undecided:
        """As ``HeldManifest``: nothing is known before the file is decompressed."""
        del node_id, coords
        return EXPAND

    def expand(self, node_id: NodeId | None = None) -> HeldManifest:
        """As ``HeldManifest``."""
        del node_id
        return self._open(self._data)


class PackedManifest:
    """The FlatBuffer of a manifest, decompressed, and those arrays that were decoded."""

    is_whole = True
    columns = None

    def __init__(self, payload: bytes | memoryview | Buffer, *, seconds_cut: bool = False) -> None:
        """Look at the root of ``payload``; nothing else is checked before it is needed.

        Raises:
            FormatError: the root is damaged.
        """
        self._seconds_cut = seconds_cut
        self._buffer = payload if isinstance(payload, Buffer) else Buffer(payload)
        self._view = self._buffer.payload
        self._size = len(self._view)
        self._vtables: dict[int, tuple[int, ...]] = {}
        root = self._follow(0)
        self.id_place = self._field(root, 0, ManifestId.size_bytes, required="id")
        """Where the id is in the payload."""
        self.id = ManifestId(self._bytes(self.id_place, ManifestId.size_bytes))
        self._nodes = self._vector(root, 1, required="arrays")
        self._places: dict[bytes, tuple[int, int]] = {}  # where references begin, how many
        self._decoded: dict[NodeId, dict[int, ChunkRefs]] = {}  # by array and rank
        self._peeks: dict[bytes, int] = {}
        self._most_peeks = _PEEKS if self._size >= _LARGE_BYTES else 1

    @property
    def weight(self) -> int:
        """As ``HeldManifest``; arrays of small ones count before they are decoded."""
        # A cache asks when it takes the manifest in. What small arrays will take when they are
        # decoded, which nobody is told of, is counted beforehand; large ones go through `expand`,
        # and are weighed again.
        packed = self._size // BYTES_PER_REF
        if self._size < _LARGE_BYTES:
            return 1 + 2 * packed
        return (
            1 + packed + sum(len(it) for ranks in self._decoded.values() for it in ranks.values())
        )

    def lookup(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | Undecided | None:
        """As ``HeldManifest``: a few chunks that exist are found, then decoding pays."""
        known = self._decoded.get(node_id)
        if known is None:
            if self._is_beyond(node_id):
                return EXPAND
            peeks = self._peeks.get(node_id, 0)
            if peeks < self._most_peeks:
                # Several threads may look up at once. A count that is lost, or an array that is
                # decoded twice, costs time and changes no result.
                self._peeks[node_id] = peeks + 1
                found = self.find(node_id, coords)
                if found is not None:
                    return found
            # A few references are decoded here, so that the next lookup need not wait.
            # Where an array was not found, nodes may be out of order: only reading all of them
            # tells.
            if self._size >= _LARGE_BYTES or not self._place(node_id)[1]:
                return EXPAND
            known = self._decode(node_id)
        refs = known.get(len(coords))
        row = None if refs is None else refs.find(coords)
        return None if refs is None or row is None else refs.ref(row)

    def expand(self, node_id: NodeId | None = None) -> Manifest | PackedManifest:
        """As ``HeldManifest``: decode an array, or all if others were looked at already."""
        count = self._nodes[1]
        if count == len(self._decoded) > 0:  # an array was read before it is changed
            return self._columns()
        is_only = count == 1
        if node_id is None or is_only or self._is_beyond(node_id) or not self._place(node_id)[1]:
            from icechunk_async.format.manifest.reading import decode_manifest  # noqa: PLC0415 -- on use

            return decode_manifest(self._view, seconds_cut=self._seconds_cut)
        self._decode(node_id)
        return self

    def _columns(self) -> Manifest:
        """Return the manifest whose arrays are all decoded already."""
        from icechunk_async.format.manifest.reading import Manifest  # noqa: PLC0415 -- on use

        arrays: dict[NodeId, ChunkRefs] = {}
        strays: dict[tuple[NodeId, int], ChunkRefs] = {}
        for node_id, ranks in self._decoded.items():
            for refs in ranks.values():  # the commonest rank first
                if arrays.setdefault(node_id, refs) is not refs:
                    strays[node_id, refs.rank] = refs
        return Manifest(self.id, arrays, strays)

    def _decode(self, node_id: NodeId) -> dict[int, ChunkRefs]:
        """Decode one array that is there; return its references by rank."""
        from icechunk_async.format.flatbuffers.reading import Vectors  # noqa: PLC0415 -- on use
        from icechunk_async.format.manifest.reading import decode_array  # noqa: PLC0415 -- on use

        first, count = self._place(node_id)
        vector = Vectors(self._buffer, np.array([first]), np.array([count]), 4)
        # Alone as together: `decode_manifest` bounds the vectors of all arrays, this one that of
        # its array.
        vector.check_tables()
        parts = decode_array(vector, self._dictionary)
        if self._seconds_cut:
            parts = [replace(refs, seconds_cut=True) for refs in parts]
        found = self._decoded[node_id] = {refs.rank: refs for refs in parts}
        return found

    def _is_beyond(self, node_id: NodeId) -> bool:
        """Return whether an array is one of too many to look at each alone."""
        return len(self._peeks) >= _APART and node_id not in self._peeks

    def find(
        self, node_id: NodeId, coords: Coordinates, rows: range | None = None
    ) -> ChunkRef | None:
        """Return the reference of a chunk; None if it was not found, whether or not it exists.

        Args:
            node_id: the array.
            coords: the chunk.
            rows: where to look among the references of the array; everywhere if not given.

        Raises:
            FormatError: a table on the way is damaged.

        Cost: about twenty tables are looked at in a manifest of a million.
        """
        entry = self.entry(node_id, coords, rows)
        return None if entry is None else self._ref(self._follow(entry), coords)

    def entry(self, node_id: NodeId, coords: Coordinates, rows: range | None = None) -> int | None:
        """Return where the vector of references refers to a chunk; else as `find`."""
        first, count = self._place(node_id)
        low, high = (0, count) if rows is None else (rows.start, min(rows.stop, count))
        while low < high:
            middle = (low + high) // 2
            # A file out of order can hide a chunk from bisection, but not make it find another one.
            found = self._coords(self._follow(first + 4 * middle))
            if found == coords:
                return first + 4 * middle
            if found < coords:
                low = middle + 1
            else:
                high = middle
        return None

    def _place(self, node_id: NodeId) -> tuple[int, int]:
        """Return where the references of an array begin, and how many there are.

        Zeros if the array was not found, whether or not it is there.

        Raises:
            FormatError: a table on the way is damaged, or the array is found twice.
        """
        known = self._places.get(node_id)
        if known is not None:
            return known
        _, count = self._nodes
        row = bisect_left(range(count), bytes(node_id), key=self._node)
        if row == count or self._node(row) != node_id:
            return 0, 0
        # Bisection finds the first of equal ids, so one look behind it tells whether there are two.
        if row + 1 < count and self._node(row + 1) == node_id:
            from icechunk_async.format.manifest.reading import listed_twice  # noqa: PLC0415 -- on use

            raise listed_twice(self.id, node_id)
        found = self._vector(self._array(row), 1, required="refs")
        self._places[node_id] = found
        return found

    def _array(self, row: int) -> int:
        """Return where the table of an array is."""
        return self._follow(self._nodes[0] + 4 * row)

    def _node(self, row: int) -> bytes:
        """Read the id of an array."""
        size = NodeId.size_bytes
        return self._bytes(self._field(self._array(row), 0, size, required="node_id"), size)

    def _ref(self, table: int, coords: Coordinates) -> ChunkRef | None:
        """Read one reference as `decode_rows` does, of which virtual ones need most of the work."""
        native = self._field(table, 4, ChunkId.size_bytes)
        # In the order of precedence of the official reader: id, compressed location, location,
        # inline.
        if native:
            offset, length = self._number(table, 2), self._number(table, 3)
            if offset + length >= 1 << 63:
                from icechunk_async.format.manifest.reading import beyond_objects  # noqa: PLC0415 -- on use

                raise beyond_objects()
            return NativeChunk(ChunkId(self._bytes(native, ChunkId.size_bytes)), offset, length)
        is_virtual = self._field(table, 5, 4) or self._field(table, 8, 4)
        if not is_virtual and self._field(table, 1, 4):
            start, size = self._vector(table, 1, item_size=1)
            self._check(start, size)
            return InlineChunk(self._view[start : start + size])
        from icechunk_async.format.flatbuffers.reading import Tables  # noqa: PLC0415 -- on use
        from icechunk_async.format.manifest.reading import decode_rows  # noqa: PLC0415 -- on use

        tables = Tables(self._buffer, np.array([table], np.int64))
        columns = np.array([coords], np.uint32).reshape(1, len(coords))
        found = decode_rows(tables, columns, self._dictionary)
        return replace(found, seconds_cut=self._seconds_cut).ref(0)

    @cached_property
    def _dictionary(self) -> bytes | None:
        from icechunk_async.format.flatbuffers.reading import Tables  # noqa: PLC0415 -- on use
        from icechunk_async.format.manifest.reading import location_dictionary  # noqa: PLC0415 -- on use

        return location_dictionary(Tables.root(self._buffer))

    def _coords(self, table: int) -> Coordinates:
        """Read the coordinates of a reference, its first field."""
        first, count = self._vector(table, 0, required="index")
        # Before `unpack_from`, which would make a tuple of a hostile count of numbers.
        if count > MAX_RANK:
            raise outside()
        self._check(first, 4 * count)
        return unpack_from(f"<{count}I", self._view, first)

    def _field(self, table: int, slot: int, size: int, *, required: str | None = None) -> int:
        """Return where a field is; 0 if it is absent."""
        vtable = self._vtable(table - self._word(_I32, table))
        # `vtable[0]` is its size and `vtable[1]` that of its tables. Whether the table itself is in
        # the buffer is checked with each word that is read of it.
        distance = vtable[slot + 2] if slot + 2 < len(vtable) else 0
        if distance:
            if distance + size > vtable[1]:
                raise beyond_table()
            return table + distance
        if required is not None:
            raise lacking(required)
        return 0

    def _vtable(self, place: int) -> tuple[int, ...]:
        """Read its size, that of its tables, and how far into them each known field lies."""
        known = self._vtables.get(place)
        if known is None:
            # At least its two sizes, and no more fields than are known: others are never asked for.
            count = min(max(2, self._word(_U16, place) // 2), _MAX_SLOTS + 2)
            self._check(place, 2 * count)
            known = unpack_from(f"<{count}H", self._view, place)
            # A hostile file may have one for each table, and the cache would grow with every
            # lookup.
            if len(self._vtables) < _MAX_VTABLES:
                self._vtables[place] = known
        return known

    def _number(self, table: int, slot: int) -> int:
        place = self._field(table, slot, 8)
        return self._word(_U64, place) if place else 0

    def _vector(
        self, table: int, slot: int, *, item_size: int = 4, required: str | None = None
    ) -> tuple[int, int]:
        """Return where the items of a vector begin, and how many there are; none is read yet."""
        vector = self._follow(self._field(table, slot, 4, required=required))
        count = self._word(_U32, vector)
        self._check_inside(vector + 4, item_size * count)
        return vector + 4, count

    def _follow(self, position: int) -> int:
        distance = self._word(_U32, position)
        if not distance:
            raise pointless()
        return position + distance

    def _bytes(self, position: int, size: int) -> bytes:
        self._check(position, size)
        return bytes(self._view[position : position + size])

    def _word(self, kind: Struct, position: int) -> int:
        self._check(position, kind.size)
        # The official reader verifies alignment and refuses the file: it would be readable here and
        # nowhere else.
        if position & (kind.size - 1):
            raise misaligned()
        value: int = kind.unpack_from(self._view, position)[0]
        return value

    def _check_inside(self, position: int, size: int) -> None:
        if not 0 <= position <= self._size - size:
            raise outside()

    # `_PartialManifest` overrides this one, where bytes may not be fetched yet. `_check_inside` is
    # for bytes that nobody reads now, such as the items of a vector.
    _check = _check_inside
    """Make sure that bytes can be read before they are."""
