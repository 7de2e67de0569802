"""Large manifests in pieces: of a Parquet file the metadata, and the groups of rows asked for.

The metadata has the smallest and the greatest array and coordinates of each group of rows, if its
writer stored them. A group whose bounds leave a chunk out is not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.draft.coordinates import encode_coords
from icechunk_async.format.draft.manifests import MANIFEST, READ_SCHEMA, decode_groups
from icechunk_async.format.draft.pages import read_footer
from icechunk_async.format.draft.parquet import ParquetReader
from icechunk_async.format.manifest.held import EXPAND, Undecided

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.draft.pages import Group
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.held import Extent
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates

__all__ = ["UNSIZED_TAIL", "PiecewiseManifest", "longer_tail", "open_pieces"]

UNSIZED_TAIL: Final = 1 << 17
"""Bytes at the end of a file that are read first; smaller files are read whole by that."""
_TRAILER: Final = 8
"""The length of the metadata, and the letters that end a file."""
_MOST_GROUPS: Final = 4
"""Groups that a chunk may be in; if there are more, the whole file is read."""
_BYTES_PER_GROUP: Final = 40


def longer_tail(size_bytes: int, tail: bytes | memoryview) -> Extent | None:
    """Return the end of a file that holds its metadata; None if ``tail`` does, or is damaged."""
    length = int.from_bytes(tail[-_TRAILER:-4], "little") + _TRAILER
    if len(tail) < _TRAILER or len(tail) >= length or length > size_bytes:
        return None
    return size_bytes - length, size_bytes


def open_pieces(
    manifest_id: ManifestId, size_bytes: int, tail: bytes | memoryview
) -> PiecewiseManifest | None:
    """Open a manifest by the end of its file; None if that does not hold its metadata."""
    try:
        return PiecewiseManifest(manifest_id, size_bytes, tail)
    except FormatError:
        return None  # the whole file decides


class PiecewiseManifest:
    """A `HeldManifest` of which only some groups of rows are in memory."""

    is_whole = False
    columns = None

    def __init__(self, manifest_id: ManifestId, size_bytes: int, tail: bytes | memoryview) -> None:
        """Read the metadata; as `open_pieces`.

        Raises:
            FormatError: it is damaged, or not in ``tail``.
        """
        self.id = manifest_id
        footer = read_footer(memoryview(tail), size_bytes, MANIFEST)
        self._data = np.zeros(size_bytes, np.uint8)  # takes no memory where nothing is put
        self._put(size_bytes - len(tail), tail)
        self._reader = ParquetReader(self._data, MANIFEST, schema=READ_SCHEMA, footer=footer)
        self._groups = [_Bounds(it) for it in footer.groups]
        self._extents = [_extent(it) for it in footer.groups]
        self._held: Mapping[int, Manifest] = {}

    @property
    def weight(self) -> int:
        """As ``HeldManifest``."""
        groups = 1 + len(self._groups) * _BYTES_PER_GROUP
        return groups + sum(it.weight for it in self._held.values())

    def lookup(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | Undecided | None:
        """As ``HeldManifest``: the groups that the chunk may be in are asked for."""
        number, raw = int.from_bytes(node_id), encode_coords(coords)
        groups = [at for at, it in enumerate(self._groups) if it.may_hold(number, raw)]
        if len(groups) > _MOST_GROUPS:
            return EXPAND
        held = self._held
        for group in groups:
            found = held[group].lookup(node_id, coords) if group in held else None
            if found is not None:
                return found
        absent = {self._extents[group]: group for group in groups if group not in held}

        def fill(extent: Extent, data: bytes | memoryview) -> None:
            self._fill(absent[extent], extent, data)

        return Undecided(tuple(absent), fill) if absent else None

    def _fill(self, group: int, extent: Extent, data: bytes | memoryview) -> None:
        start, stop = extent
        if len(data) != stop - start:
            raise FormatError(f"A {MANIFEST} ends before its group of rows {group} does.")
        self._put(start, data)
        decoded = decode_groups(self.id, self._reader, [group])
        self._held = {**self._held, group: decoded}
        self._data[start:stop] = 0

    def _put(self, start: int, data: bytes | memoryview) -> None:
        if not 0 <= start <= len(self._data) - len(data):
            raise FormatError(f"A {MANIFEST} has another size than it was said to have.")
        self._data[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def expand(self, node_id: NodeId | None = None) -> Manifest:
        """As ``HeldManifest``, for whole manifests; this one never is."""
        del node_id
        raise AssertionError("a manifest in pieces has no fuller form without its file")


class _Bounds:
    """The arrays and coordinates that a group of rows can have."""

    def __init__(self, group: Group) -> None:
        self._empty = not group.num_rows
        self._arrays: tuple[int, int] | None = None
        self._coords: tuple[bytes, bytes] | None = None
        for column in group.columns:
            if column.path == "coord":
                self._coords = column.bounds
            elif column.path == "array_id" and column.bounds is not None:
                least, most = (int.from_bytes(it, "little") for it in column.bounds)
                self._arrays = least, most

    def may_hold(self, number: int, coords: bytes) -> bool:
        """Return whether a chunk may be in the group."""
        arrays, between = self._arrays, self._coords
        return (
            not self._empty
            and (arrays is None or arrays[0] <= number <= arrays[1])
            and (between is None or between[0] <= coords <= between[1])
        )


def _extent(group: Group) -> Extent:
    """Return the bytes of a group's columns that are read."""
    columns = [it for it in group.columns if it.path in READ_SCHEMA.names]
    if not columns:
        raise FormatError(f"A {MANIFEST} has none of the columns that it needs.")
    return min(it.start for it in columns), max(it.stop for it in columns)
