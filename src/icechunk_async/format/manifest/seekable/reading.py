"""Find references in a seekable manifest of which only a few pieces are in memory.

The buffer has the manifest's full length, but only pieces that were filled in take memory. Each
read of the buffer first checks that the bytes are present; an `AbsentPiecesError` names the pieces
to fetch, and then the search starts again.

An index can save time and nothing else. What is found has the coordinates that were asked for, in
pieces whose checksums are right; that a chunk does not exist only the whole file tells.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zstandard

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import HEADER_BYTES, FileType, check_header
from icechunk_async.format.flatbuffers.buffer import Buffer, as_array
from icechunk_async.format.manifest.held import BYTES_PER_REF, EXPAND, Undecided
from icechunk_async.format.manifest.packed import PackedManifest
from icechunk_async.format.manifest.seekable.index import SeekIndex, index_size
from icechunk_async.format.manifest.seekable.pieces import decompress_piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Bytes, Places, Positions
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.held import Extent

__all__ = ["AbsentPiecesError", "SeekableManifest", "longer_tail", "open_seekable", "tail_extent"]

_MIN_TAIL_BYTES: Final = 1 << 14
_MAX_TAIL_BYTES: Final = 1 << 18
_TAIL_SHARE: Final = 512
"""Most indexes take less than one part in this many of their file."""
_LOOKUPS: Final = 512
"""A whole manifest is decoded in the time of one lookup for each this many of its references."""
_MIN_LOOKUPS: Final = 64
_SHARE: Final = 4
"""At most one part in this many of a manifest is fetched piece by piece."""
_MAX_SHAPES: Final = 8
"""Pieces fetched for references of different shapes that lie in one stretch of rows."""


def tail_extent(size_bytes: int) -> Extent:
    """Return the end of a file that most likely holds the whole index, if it has one."""
    guess = min(max(size_bytes // _TAIL_SHARE, _MIN_TAIL_BYTES), _MAX_TAIL_BYTES, size_bytes)
    return size_bytes - guess, size_bytes


def longer_tail(size_bytes: int, tail: bytes | memoryview) -> Extent | None:
    """Return the end of a file that holds its index; None if ``tail`` does, or it has no index."""
    size = index_size(tail)
    return (
        None
        if size is None or not len(tail) < size <= size_bytes
        else (size_bytes - size, size_bytes)
    )


def open_seekable(
    manifest_id: ManifestId, size_bytes: int, tail: bytes | memoryview
) -> SeekableManifest | None:
    """Open a manifest, without any piece of it, by its index; None without a usable one.

    Args:
        manifest_id: which one.
        size_bytes: the size of its file.
        tail: the end of the file, with the whole index; see `longer_tail`.
    """
    if index_size(tail) is None:
        return None
    try:
        return SeekableManifest(manifest_id, SeekIndex.decode(tail, size_bytes))
    except (FormatError, MemoryError):  # an index may declare any size
        return None


class AbsentPiecesError(Exception):
    """A search needs pieces that are not in memory; not an error of the repository."""

    def __init__(self, pieces: Sequence[int]) -> None:
        """Name the pieces."""
        super().__init__(pieces)
        self.pieces = pieces


class _PartialBuffer(Buffer):
    """A FlatBuffer of which some pieces are present. What was read from it does not change.

    Attributes:
        data: the same memory, to be filled in.
        present: by piece, whether it is there.
    """

    def __init__(self, index: SeekIndex) -> None:
        self.present = bytearray(len(index))
        self._edges = index.cuts
        self._cuts: list[int] = index.cuts.tolist()
        # The full length, so that positions in the payload are positions here.
        self.data = _untouched(self._cuts[-1])
        super().__init__(memoryview(self.data).toreadonly())

    def need(self, position: int, size: int) -> None:
        """Raise AbsentPiecesError unless bytes, known to be in the buffer, are present."""
        if size:
            first = bisect_right(self._cuts, position) - 1
            # Up to the first cut that is not below the end: a piece that begins at the end is not
            # needed.
            last = bisect_left(self._cuts, position + size, first + 1)
            absent = [piece for piece in range(first, last) if not self.present[piece]]
            if absent:
                raise AbsentPiecesError(absent)

    def shorts(self, position: int, count: int) -> tuple[int, ...]:
        """Read consecutive 16-bit words, all of which must be present."""
        self.check_one(position, 2 * count, 2)
        self.need(position, 2 * count)
        return super().shorts(position, count)

    # Every way to the bytes asks first whether they are there: what is absent reads as zeros,
    # and zeros are valid offsets and ids.
    def _read(self, positions: Places, width: int) -> npt.NDArray[Any]:
        self.require(positions, width)
        return super()._read(positions, width)

    def rows(self, positions: Places, size: int) -> Bytes:
        """Return the bytes at each position, all of which must be present."""
        self.check(positions, size, 1)
        self.require(positions, size)
        return super().rows(positions, size)

    def require(self, positions: Places, sizes: Positions | int) -> None:
        """Raise AbsentPiecesError unless all bytes, known to be in the buffer, are present."""
        starts = as_array(positions)
        ends = starts + sizes
        # Positions of a column lie close together, mostly in pieces that are all there.
        if not len(starts) or self._is_present(int(starts.min()), int(ends.max())):
            return
        firsts = np.searchsorted(self._edges, starts, "right") - 1
        lasts = np.maximum(np.searchsorted(self._edges, ends), firsts + 1)
        absent = np.cumsum(np.frombuffer(self.present, np.uint8) == 0)
        # Running counts: pieces [first, last) are all there if the count is the same at both.
        absent = np.concatenate([[0], absent])
        lacking = (absent[lasts] > absent[firsts]) & (ends > starts)
        if lacking.any():
            row = int(lacking.argmax())
            self.need(int(starts[row]), int(ends[row] - starts[row]))

    def _is_present(self, start: int, end: int) -> bool:
        """Return whether every piece with some of these bytes is present."""
        first = bisect_right(self._cuts, start) - 1
        return self.present.find(0, first, bisect_left(self._cuts, end, first + 1)) < 0


class _PartialManifest(PackedManifest):
    """The FlatBuffer of a manifest, some of it absent."""

    def __init__(self, buffer: _PartialBuffer) -> None:
        """Look at the root, which must be present."""
        self._partial = buffer
        super().__init__(buffer)
        _ = self._dictionary  # near the root, and read in the same round

    def _check(self, position: int, size: int) -> None:
        self._check_inside(position, size)
        self._partial.need(position, size)


def _untouched(size: int) -> npt.NDArray[np.uint8]:
    """Return zeros that take memory only where they are written, one small page at a time.

    NumPy would ask for huge pages, of which each piece fills a part.
    """
    pages = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that knows of none
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8, size)


class SeekableManifest:
    """A manifest that is searched piece by piece. Usable from any thread."""

    is_whole = False
    columns = None

    def __init__(self, manifest_id: ManifestId, index: SeekIndex) -> None:
        """Begin with nothing but the index."""
        self.id = manifest_id
        self.index = index
        self.finds = 0
        """How often `find` succeeded or gave up."""
        self.present_bytes = 0
        """The memory that the present pieces take."""
        self._buffer = _PartialBuffer(index)
        self._packed: _PartialManifest | None = None
        self._given_up = False

    def lookup(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | Undecided:
        """As ``HeldManifest``: a chunk that exists is found in two or three rounds of reads.

        Reading and decoding the whole file is better once much was looked up, and is needed to
        tell that a chunk does not exist, or what is wrong with a damaged manifest.
        """
        if self._given_up:
            return EXPAND
        if self._packed is None:  # nothing can be found yet: do not search in vain
            likely = self.likely(node_id, coords)
            if likely:
                return self._undecided(likely)
        try:
            found = self.find(node_id, coords)
        except AbsentPiecesError as absent:
            return self._undecided({*absent.pieces, *self.likely(node_id, coords)})
        except FormatError:
            # The index may be to blame, which nobody but this reader needs. The whole file decides.
            return EXPAND
        # Decided between lookups, so that one that has read some pieces may finish with more.
        self._given_up = self.worn_out
        return EXPAND if found is None else found

    def _undecided(self, pieces: Iterable[int]) -> Undecided:
        return Undecided(tuple(self.extents(sorted(pieces))), self.fill)

    def expand(self, node_id: NodeId | None = None) -> SeekableManifest:
        """As ``HeldManifest``, for whole manifests; this one never is."""
        del node_id
        raise AssertionError("a manifest in pieces has no fuller form without its file")

    @property
    def worn_out(self) -> bool:
        """Whether so much was looked up that decoding the whole file would have been faster."""
        count = sum(it.count for it in self.index.arrays.values())
        return (
            self.finds >= max(_MIN_LOOKUPS, count // _LOOKUPS)
            or self.present_bytes * _SHARE > self._buffer.size
        )

    @property
    def weight(self) -> int:
        """As ``HeldManifest``."""
        return 1 + self.present_bytes // BYTES_PER_REF

    def likely(self, node_id: NodeId, coords: Coordinates) -> list[int]:
        """Return the absent pieces that `find` will probably want."""
        pieces = self.index.likely(node_id, self.index.rows(node_id, coords))
        return [piece for piece in pieces if not self._buffer.present[piece]]

    def find(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | None:
        """Return the reference of a chunk; None if it was not found, whether or not it exists.

        Raises:
            AbsentPiecesError: call again once these pieces are present.
            FormatError: the pieces are damaged, or belong to another manifest.
        """
        rows = self.index.rows(node_id, coords)
        try:
            found = self._opened().find(node_id, coords, rows)
        except AbsentPiecesError as absent:
            # What the next steps of the search will want, as far as it can be told: each round
            # of requests to a service takes as long as fetching megabytes.
            wanted = {*absent.pieces, *self._pieces_of(node_id, rows)}
            raise AbsentPiecesError(sorted(wanted)) from None
        # Without a lock: a count that threads lose delays by one lookup when the whole file is
        # read.
        self.finds += 1
        return found

    def entry(self, node_id: NodeId, coords: Coordinates) -> int | None:
        """Return where the vector of references refers to a chunk.

        Errors, and the meaning of None, as `find`.
        """
        return self._opened().entry(node_id, coords, self.index.rows(node_id, coords))

    def id_place(self) -> int:
        """Return where in the payload the manifest's id is. Errors as `find`."""
        return self._opened().id_place

    def piece(self, number: int) -> bytes:
        """Copy a piece of the payload, which must be present."""
        start, stop = self.index.cuts[number : number + 2].tolist()
        self._buffer.need(start, stop - start)
        return self._buffer.data[start:stop].tobytes()

    def _opened(self) -> _PartialManifest:
        if self._packed is None:
            packed = _PartialManifest(self._buffer)
            # With a sound index over the pieces of another manifest, references would be those of
            # another commit.
            if packed.id != self.id:
                raise FormatError(f"Manifest {self.id} calls itself {packed.id}.")
            self._packed = packed
        return self._packed

    def _pieces_of(self, node_id: NodeId, rows: range) -> list[int]:
        """Return the absent pieces that hold some rows, if the vector of references is present.

        References of different shapes lie apart, so a search would need one round for each.
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
        """Decompress the pieces in an extent of the object into place.

        Args:
            extent: one that `extents` returned.
            data: the bytes there.

        Raises:
            FormatError: they are not what the index says; pieces present before are kept.

        Cost: time for decompression; other threads may run meanwhile.
        """
        start, stop = extent
        # A server may send less than was asked for.
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
            # Two threads that fetched the same piece write the same bytes, since both passed the
            # checksum.
            self._buffer.data[at:end] = np.frombuffer(raw, np.uint8)
            if not self._buffer.present[piece]:
                self._buffer.present[piece] = 1  # after the bytes: other threads may be reading
                self.present_bytes += end - at

    def _check_headers(self, view: memoryview) -> None:
        check_header(view, FileType.MANIFEST)
        try:
            declared = zstandard.get_frame_parameters(view[HEADER_BYTES:]).content_size
        except zstandard.ZstdError as error:
            raise FormatError(f"A manifest file has a damaged zstd frame: {error}.") from error
        if declared != self._buffer.size:
            # Other readers would believe the frame: they must not find other references.
            raise FormatError(
                f"A manifest file declares {declared} bytes, and its index {self._buffer.size}."
            )
