"""Manifests that are in memory whole and not decoded: as their file, or decompressed.

Decoding a million references takes a good part of a second, and many readers want only a few of
them, which bisection in the bytes finds. What it finds is right, since the coordinates are those
asked for. That a chunk does not exist is certain only once the order of the references was checked,
so that is never concluded here.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct, unpack_from
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import FileType, may_cut_seconds, unpack
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.manifest.held import BYTES_PER_REF, EXPAND
from icechunk_async.format.manifest.reading import (
    MAX_RANK,
    decode_manifest,
    decode_rows,
    location_dictionary,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.format.manifest.held import HeldManifest, Undecided
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates

__all__ = ["ManifestFile", "PackedManifest", "open_manifest"]

_LARGE_BYTES: Final = 1 << 18
"""Payloads from this size are decoded only once more than a few of their chunks are looked up."""
_PEEKS: Final = 16
"""Lookups by bisection, after which decoding pays."""
_U16, _U32, _I32 = Struct("<H"), Struct("<I"), Struct("<i")
_MAX_ARRAYS: Final = 64
"""Arrays that are looked through one by one; writers put one into a manifest."""


def open_manifest(data: bytes | memoryview) -> Manifest | PackedManifest:
    """Decompress the file of a manifest, and decode it if it is small.

    Raises:
        UnsupportedSpecVersionError, FormatError: the file cannot be read.
    """
    payload = unpack(data, FileType.MANIFEST).payload
    seconds_cut = may_cut_seconds(data)
    if len(payload) >= _LARGE_BYTES:
        return PackedManifest(payload, seconds_cut=seconds_cut)
    return decode_manifest(payload, seconds_cut=seconds_cut)


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

    def expand(self) -> HeldManifest:
        """As ``HeldManifest``."""
        return self._open(self._data)


class PackedManifest:
    """The FlatBuffer of a manifest, decompressed."""

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
        root = Tables.root(self._buffer)
        self.id = ManifestId(root.struct(0, ManifestId.size_bytes, field="id").tobytes())
        self.id_place = int(root.places(0, ManifestId.size_bytes, field="id")[0])
        """Where the id is in the payload."""
        self._lookups = 0
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
        """As ``HeldManifest``."""
        return len(self._view) // BYTES_PER_REF

    def lookup(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | Undecided:
        """As ``HeldManifest``: a few chunks that exist are found, then decoding pays."""
        if self._lookups >= _PEEKS:
            return EXPAND
        self._lookups += 1
        found = self.find(node_id, coords)
        return EXPAND if found is None else found

    def expand(self) -> Manifest:
        """As ``HeldManifest``."""
        return decode_manifest(self._view, seconds_cut=self._seconds_cut)

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
        if entry is None:
            return None
        tables = Tables(self._buffer, np.array([self._follow(entry)], np.int64))
        columns = np.array([coords], np.uint32).reshape(1, len(coords))
        found = decode_rows(tables, columns, self._dictionary)
        return replace(found, seconds_cut=self._seconds_cut).ref(0)

    def entry(self, node_id: NodeId, coords: Coordinates, rows: range | None = None) -> int | None:
        """Return where the vector of references refers to a chunk; else as `find`."""
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
        """Make sure that bytes are in the buffer before they are read."""
        if not 0 <= position <= len(self._view) - size:
            raise _outside()


def _outside() -> FormatError:
    return FormatError("A FlatBuffer refers to bytes outside of itself.")
