"""Finding one reference in a manifest that is not decoded: bisection in its bytes.

Decoding a manifest of a million references takes a good part of a second, and many readers want
only a few of them. What bisection finds is right, since its coordinates are those asked for. That
something is missing is only known for sure of a file whose order was checked, so it is never
answered here.
"""

from __future__ import annotations

from struct import Struct, unpack_from
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.manifest.reading import MAX_RANK, decode_rows, location_dictionary

if TYPE_CHECKING:
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates

__all__ = ["BYTES_PER_REF", "PackedManifest"]

BYTES_PER_REF: Final = 40
"""Roughly what a reference takes in a manifest that is not decoded."""

_U16, _U32, _I32 = Struct("<H"), Struct("<I"), Struct("<i")
_MAX_ARRAYS: Final = 64
"""Arrays that are looked through one by one; writers put one into a manifest."""


class PackedManifest:
    """The bytes of a manifest, decompressed."""

    def __init__(self, payload: bytes | memoryview | Buffer) -> None:
        """Look at the root of ``payload``; nothing else is checked before it is needed.

        Raises:
            FormatError: the root is damaged.
        """
        self._buffer = payload if isinstance(payload, Buffer) else Buffer(payload)
        self.payload = self._view = self._buffer.payload
        root = Tables.root(self._buffer)
        self.id = ManifestId(root.struct(0, ManifestId.size_bytes, field="id").tobytes())
        self.id_place = int(root.places(0, ManifestId.size_bytes, field="id")[0])
        """Where the id is in the payload."""
        self.finds = 0
        """How often :meth:`find` was asked."""
        self._dictionary = location_dictionary(root)
        arrays = root.vector(1, 4, 4, required="arrays")
        self._arrays: dict[bytes, tuple[int, int]] = {}  # where references begin, how many
        if int(arrays.counts[0]) <= _MAX_ARRAYS:
            tables = arrays.tables()
            nodes = tables.struct(0, NodeId.size_bytes, field="node_id")
            refs = tables.vector(1, 4, 4, required="refs")
            places = zip(refs.starts.tolist(), refs.counts.tolist(), strict=True)
            self._arrays = {node.tobytes(): it for node, it in zip(nodes, places, strict=True)}

    @property
    def weight(self) -> int:
        """As how many references this counts in a cache."""
        return len(self.payload) // BYTES_PER_REF

    def find(
        self, node_id: NodeId, coords: Coordinates, rows: range | None = None
    ) -> ChunkRef | None:
        """Return the reference of a chunk; None if it was not found, whether or not it is there.

        Args:
            node_id: the array.
            coords: the chunk.
            rows: where to look among the references of the array; everywhere if not given.

        Raises:
            FormatError: a table on the way is damaged.

        Cost: about twenty tables are looked at in a manifest of a million.
        """
        self.finds += 1
        entry = self.entry(node_id, coords, rows)
        if entry is None:
            return None
        tables = Tables(self._buffer, np.array([self._follow(entry)], np.int64))
        columns = np.array([coords], np.uint32).reshape(1, len(coords))
        return decode_rows(tables, columns, self._dictionary).ref(0)

    def entry(self, node_id: NodeId, coords: Coordinates, rows: range | None = None) -> int | None:
        """Return where the vector of references refers to a chunk; else as :meth:`find`."""
        first, count = self._arrays.get(bytes(node_id), (0, 0))
        low, high = (0, count) if rows is None else (rows.start, min(rows.stop, count))
        while low < high:
            middle = (low + high) // 2
            found = self._coords(self._follow(first + 4 * middle))
            if found == coords:
                return first + 4 * middle
            if found < coords:
                low = middle + 1
            else:
                high = middle
        return None

    def _coords(self, table: int) -> Coordinates:
        """Read the coordinates of a reference, its first field."""
        vtable = table - self._word(_I32, table)
        place = self._word(_U16, vtable + 4)
        vector = self._follow(table + place)
        count = self._word(_U32, vector)
        if count > MAX_RANK:
            raise _outside()
        self._check(vector + 4, 4 * count)
        return unpack_from(f"<{count}I", self._view, vector + 4)

    def _follow(self, position: int) -> int:
        return position + self._word(_U32, position)

    def _word(self, kind: Struct, position: int) -> int:
        self._check(position, kind.size)
        value: int = kind.unpack_from(self._view, position)[0]
        return value

    def _check(self, position: int, size: int) -> None:
        """Make sure that bytes are there before they are read."""
        if not 0 <= position <= len(self._view) - size:
            raise _outside()


def _outside() -> FormatError:
    return FormatError("A FlatBuffer refers to bytes outside of itself.")
