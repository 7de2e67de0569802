"""Find references in a seekable manifest of which only a few pieces are in memory.

It has its full length, but only what was put there takes room: the system gives pages when they are
written to.

Whatever reads the payload asks first whether the bytes are here, and an :class:`AbsentPiecesError`
names the pieces to fetch; then the search begins anew.

An index can save time and nothing else. What is found has the coordinates that were asked for, in
pieces whose checksums are right; that something is missing only the whole file tells.
"""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zstandard

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import HEADER_BYTES, FileType, check_header
from icechunk_async.format.flatbuffers.buffer import Buffer, as_array
from icechunk_async.format.manifest.packed import BYTES_PER_REF, PackedManifest
from icechunk_async.format.manifest.seekable.pieces import decompress_piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Bytes, Places, Positions
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates
    from icechunk_async.format.manifest.seekable.index import SeekIndex

__all__ = ["AbsentPiecesError", "Extent", "PartialBuffer", "PartialManifest", "SeekableManifest"]


class PartialBuffer(Buffer, ABC):
    """Bytes some of which are here; what is found in them is handed out, and must not change.

    Attributes:
        data: the same, to be filled in.
    """

    def __init__(self, size_bytes: int) -> None:
        """Begin with nothing of so many bytes."""
        self.data = _untouched(size_bytes)
        super().__init__(memoryview(self.data).toreadonly())

    @abstractmethod
    def need(self, position: int, size: int) -> None:
        """Make sure that some bytes, which are in the buffer, are here; else raise."""

    def shorts(self, position: int, count: int) -> tuple[int, ...]:
        """Read 16-bit words in a row, all of which must be here."""
        self.check_one(position, 2 * count, 2)
        self.need(position, 2 * count)
        return super().shorts(position, count)

    def _read(self, positions: Places, width: int) -> npt.NDArray[Any]:
        self.require(positions, width)
        return super()._read(positions, width)

    def rows(self, positions: Places, size: int) -> Bytes:
        """Return bytes at each position, all of which must be here."""
        self.check(positions, size, 1)
        self.require(positions, size)
        return super().rows(positions, size)

    def require(self, positions: Places, sizes: Positions | int) -> None:
        """Make sure that bytes known to be in the buffer are here."""
        found = as_array(positions)
        starts: list[int] = found.tolist()
        ends: list[int] = (found + sizes).tolist()
        for start, end in zip(starts, ends, strict=True):
            self.need(start, end - start)


class PartialManifest(PackedManifest):
    """The bytes of a manifest, some of them absent."""

    def __init__(self, buffer: PartialBuffer) -> None:
        """Look at the root, which must be here."""
        self._partial = buffer
        super().__init__(buffer)

    def _check(self, position: int, size: int) -> None:
        super()._check(position, size)
        self._partial.need(position, size)


def _untouched(size: int) -> npt.NDArray[np.uint8]:
    """Return zeros of which only what is written to takes memory, one small page at a time.

    NumPy asks for huge pages, of which a piece would touch one or two and fill a part.
    """
    pages = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that knows of none
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8, size)


_LOOKUPS: Final = 512
"""A whole manifest is decoded in the time of a lookup for each so many of its references."""
_MIN_LOOKUPS: Final = 64
_MAX_SHAPES: Final = 8
"""Pieces fetched for references of different shapes that lie in one stretch of rows."""
_SHARE: Final = 4
"""Nor is more than one part of so many fetched piece by piece."""

type Extent = tuple[int, int]
"""Bytes ``[start, stop)`` of a manifest's object."""


class AbsentPiecesError(Exception):
    """A search needs pieces that are not here; not an error of the repository."""

    def __init__(self, pieces: Sequence[int]) -> None:
        """Name the pieces."""
        super().__init__(pieces)
        self.pieces = pieces


class _PiecedBuffer(PartialBuffer):
    """A FlatBuffer of which some pieces are here."""

    def __init__(self, index: SeekIndex) -> None:
        self.present = bytearray(len(index))
        self._cuts: list[int] = index.cuts.tolist()
        super().__init__(self._cuts[-1])

    def need(self, position: int, size: int) -> None:
        if size:
            first = bisect_right(self._cuts, position) - 1
            last = bisect_left(self._cuts, position + size, first + 1)
            absent = [piece for piece in range(first, last) if not self.present[piece]]
            if absent:
                raise AbsentPiecesError(absent)


class SeekableManifest:
    """A manifest that is looked into piece by piece. Usable from any thread."""

    def __init__(self, manifest_id: ManifestId, index: SeekIndex) -> None:
        """Begin with nothing but the index."""
        self.id = manifest_id
        self.index = index
        self.finds = 0
        """How often :meth:`find` was asked."""
        self.present_bytes = 0
        """What the pieces that are here take in memory."""
        self._buffer = _PiecedBuffer(index)
        self._packed: PartialManifest | None = None

    @property
    def worn_out(self) -> bool:
        """Whether so much was looked for that the whole file is better decoded."""
        count = sum(it.count for it in self.index.arrays.values())
        return (
            self.finds >= max(_MIN_LOOKUPS, count // _LOOKUPS)
            or self.present_bytes * _SHARE > self._buffer.size
        )

    @property
    def weight(self) -> int:
        """As how many references this counts in a cache."""
        return 1 + self.present_bytes // BYTES_PER_REF

    def likely(self, node_id: NodeId, coords: Coordinates) -> list[int]:
        """Return the pieces that are not here and that :meth:`find` will probably want."""
        pieces = self.index.likely(node_id, self.index.rows(node_id, coords))
        return [piece for piece in pieces if not self._buffer.present[piece]]

    def find(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | None:
        """Return the reference of a chunk; None if it was not found, whether or not it is there.

        Raises:
            AbsentPiecesError: the search goes on once these pieces are here.
            FormatError: what the pieces hold is damaged, or another manifest.
        """
        rows = self.index.rows(node_id, coords)
        try:
            found = self._opened().find(node_id, coords, rows)
        except AbsentPiecesError as absent:
            wanted = {*absent.pieces, *self._pieces_of(node_id, rows)}
            raise AbsentPiecesError(sorted(wanted)) from None
        self.finds += 1
        return found

    def entry(self, node_id: NodeId, coords: Coordinates) -> int | None:
        """Return where the vector of references refers to a chunk.

        Errors and doubt as with :meth:`find`.
        """
        return self._opened().entry(node_id, coords, self.index.rows(node_id, coords))

    def id_place(self) -> int:
        """Return where in the payload the manifest's id is. Errors as :meth:`find`."""
        return self._opened().id_place

    def piece(self, number: int) -> bytes:
        """Copy a piece of the payload, which must be here."""
        start, stop = self.index.cuts[number : number + 2].tolist()
        self._buffer.need(start, stop - start)
        return self._buffer.data[start:stop].tobytes()

    def _opened(self) -> PartialManifest:
        if self._packed is None:
            packed = PartialManifest(self._buffer)
            if packed.id != self.id:
                raise FormatError(f"Manifest {self.id} calls itself {packed.id}.")
            self._packed = packed
        return self._packed

    def _pieces_of(self, node_id: NodeId, rows: range) -> list[int]:
        """Return the absent pieces among those of some rows, where the vector tells them.

        References of different shapes lie apart, and a search would come upon one after another.
        """
        fences = self.index.arrays.get(node_id)
        if fences is None:
            return []
        entries = fences.first + 4 * np.arange(rows.start, rows.stop, dtype=np.int64)
        try:
            tables = as_array(self._buffer.targets(entries))
        except (AbsentPiecesError, FormatError):
            return []
        pieces: list[int] = np.unique(
            np.searchsorted(self.index.cuts[1:-1], tables, side="right")
        ).tolist()
        absent = [piece for piece in pieces if not self._buffer.present[piece]]
        return absent[:_MAX_SHAPES]

    def extents(self, pieces: Sequence[int]) -> list[Extent]:
        """Return the bytes of the object to read for ascending pieces, neighbours joined.

        The first piece comes with the headers before it.
        """
        extents: list[Extent] = []
        for piece in pieces:
            start, stop = self.index.places[piece : piece + 2].tolist()
            if piece == 0:
                start = 0
            if extents and extents[-1][1] == start:
                extents[-1] = (extents[-1][0], stop)
            else:
                extents.append((start, stop))
        return extents

    def fill(self, extent: Extent, data: bytes | memoryview) -> None:
        """Put the pieces in place that lie in an extent of the object.

        Args:
            extent: one that :meth:`extents` answered.
            data: the bytes there.

        Raises:
            FormatError: they are not what the index says; what was here before still is.

        Cost: time for decompression; other threads may run meanwhile.
        """
        start, stop = extent
        if len(data) != stop - start:
            raise FormatError(f"A manifest of {self.index.places[-1]} bytes or more is truncated.")
        view, places, cuts = memoryview(data), self.index.places, self.index.cuts
        if start == 0:
            self._check_headers(view[: int(places[0])])
        first = int(np.searchsorted(places, max(start, int(places[0]))))
        decompressor = zstandard.ZstdDecompressor()
        for piece in range(first, int(np.searchsorted(places, stop))):
            low, high = places[piece : piece + 2].tolist()
            at, end = cuts[piece : piece + 2].tolist()
            raw = decompress_piece(
                view[low - start : high - start],
                end - at,
                int(self.index.checksums[piece]),
                last=piece == len(self.index) - 1,
                decompressor=decompressor,
            )
            self._buffer.data[at:end] = np.frombuffer(raw, np.uint8)
            if not self._buffer.present[piece]:
                self._buffer.present[piece] = 1  # after the bytes: others may look already
                self.present_bytes += end - at

    def _check_headers(self, view: memoryview) -> None:
        check_header(view, FileType.MANIFEST)
        try:
            declared = zstandard.get_frame_parameters(view[HEADER_BYTES:]).content_size
        except zstandard.ZstdError as error:
            raise FormatError(f"A manifest file has a damaged zstd frame: {error}.") from error
        if declared != self._buffer.size:
            raise FormatError(
                f"A manifest file declares {declared} bytes, and its index {self._buffer.size}."
            )
