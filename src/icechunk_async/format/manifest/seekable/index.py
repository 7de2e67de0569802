"""The index of a seekable manifest: where its pieces are, and which references are in which.

It is in a skippable frame after the manifest's frame (docs/reference/seekable-manifests.md), which
readers that do not know it pass over. All numbers are little-endian.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import HEADER_BYTES, MAX_PAYLOAD_BYTES, believable_bytes
from icechunk_async.format.ids import NodeId
from icechunk_async.format.manifest.seekable.pieces import MAX_PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    type Column = npt.NDArray[np.int64]

__all__ = ["TRAILER_BYTES", "ArrayFences", "SeekIndex", "index_size"]

_SKIPPABLE: Final = 0x184D2A5B
_FRAME: Final = Struct("<II")
_TRAILER: Final = Struct("<6I8s")
_MAGIC: Final = b"ICASEEK1"
TRAILER_BYTES: Final = _TRAILER.size
_PIECE: Final = np.dtype([("packed", "<u4"), ("raw", "<u4"), ("checksum", "<u4")])
_ARRAY: Final = Struct("<8s5I")
# Bounds of what is believed of an index, which is read before anything that it could be checked
# against. Its parts are views of its bytes: a declared count takes no memory that the file does not
# have.
_MAX_ARRAYS: Final = 64
_MAX_RANK: Final = 64
_MAX_STEP: Final = 1 << 16
"""References between fences: a lookup may look at all of them."""
_MAX_HEADER_BYTES: Final = 18
"""Of a zstd frame (RFC 8878, 3.1.1.1)."""


@dataclass(frozen=True, slots=True)
class ArrayFences:
    """A sample of an array's references, which a lookup searches before the manifest itself."""

    first: int
    """Position of the array's vector of references in the payload."""
    count: int
    """References of the array."""
    coords: npt.NDArray[np.uint32]
    """Coordinates of every ``step``-th reference, ``(n, rank)``."""
    pieces: npt.NDArray[np.uint32]
    """Where such a reference is, ``(n, 2)``: the pieces of its table and of its location."""
    shape: int
    """The piece of the first reference's vtable, which most others share."""


@dataclass(frozen=True, slots=True)
class SeekIndex:
    """Where the pieces of a manifest are, and some of the references that are in them."""

    places: Column
    """Where each piece begins in the object, and the last one ends."""
    cuts: Column
    """The same for the payload."""
    checksums: npt.NDArray[np.uint32]
    """CRC-32 of each piece, decompressed."""
    step: int
    """References from one fence to the next."""
    arrays: Mapping[NodeId, ArrayFences]

    def __len__(self) -> int:
        """Count the pieces."""
        return len(self.checksums)

    def encode(self) -> bytes:
        """Return the skippable frame."""
        pieces = np.empty(len(self), _PIECE)
        pieces["packed"], pieces["raw"] = np.diff(self.places), np.diff(self.cuts)
        pieces["checksum"] = self.checksums
        parts = [pieces.tobytes()]
        for node_id, it in self.arrays.items():
            fences, rank = it.coords.shape
            parts.append(_ARRAY.pack(node_id, it.first, it.count, rank, fences, it.shape))
            parts += [it.coords.astype("<u4").tobytes(), it.pieces.astype("<u4").tobytes()]
        body = b"".join(parts)
        size = len(body) + _TRAILER.size
        # How long the frame's header is, which no piece includes: pieces get another one when they
        # are decoded alone.
        header = int(self.places[0]) - HEADER_BYTES
        numbers = (len(self), len(self.arrays), self.step, header, _FRAME.size + size)
        trailer = _TRAILER.pack(*numbers, _checksum(body, numbers), _MAGIC)
        return _FRAME.pack(_SKIPPABLE, size) + body + trailer

    @classmethod
    def decode(cls, data: bytes | memoryview, object_bytes: int) -> SeekIndex:
        """Read an index.

        Args:
            data: the end of the object, at least `index_size` bytes.
            object_bytes: the size of the object.

        Raises:
            FormatError: it is damaged, or of another object.
        """
        size = index_size(data)
        if size is None or not _FRAME.size + _TRAILER.size <= size <= min(len(data), object_bytes):
            raise _damaged("it is missing")
        # Trailer first: from the end it says how long the frame is and how its parts divide.
        frame = memoryview(data)[len(data) - size :]
        body, trailer = frame[_FRAME.size : -_TRAILER.size], frame[-_TRAILER.size :]
        *numbers, checksum, _ = _TRAILER.unpack(trailer)
        # Before anything else is looked at: a file that was cut or mixed up ends here, and forged
        # ones are bounded by what follows.
        if _checksum(body, numbers) != checksum:
            raise _damaged("its checksum is another")
        if _FRAME.unpack_from(frame) != (_SKIPPABLE, size - _FRAME.size):
            raise _damaged("it is not in a skippable frame")
        num_pieces, num_arrays, step, header, _ = numbers
        table = _Reader(body)
        pieces = table.take(num_pieces * _PIECE.itemsize).view(_PIECE)
        if not num_pieces or header > _MAX_HEADER_BYTES or num_arrays > _MAX_ARRAYS:
            raise _damaged("it makes no sense")
        if not 0 < step <= _MAX_STEP:
            raise _damaged("its steps are too long")
        raw = pieces["raw"].astype(np.int64)
        places, cuts = _running(pieces["packed"], HEADER_BYTES + header), _running(raw, 0)
        # The pieces end where this frame begins. An index that was copied behind another file does
        # not fit.
        if int(places[-1]) != object_bytes - size:
            raise _damaged("the pieces are not the whole object")
        limit = min(MAX_PAYLOAD_BYTES, believable_bytes(object_bytes))
        # What a piece decompresses to is allocated when it is fetched, and the payload is reserved
        # when the manifest is opened, by the same bound as for whole files.
        if raw.min() < 1 or raw.max() > MAX_PIECE_BYTES or int(cuts[-1]) > limit:
            raise _damaged("pieces are too small or too large")
        arrays = dict(table.array(step) for _ in range(num_arrays))
        if any(it.first + 4 * it.count > int(cuts[-1]) for it in arrays.values()):
            raise _damaged("an array is outside of the payload")
        return cls(places, cuts, pieces["checksum"], step, arrays)

    def covering(self, start: int, stop: int) -> range:
        """Return the pieces that hold bytes ``[start, stop)`` of the payload, which has them."""
        # Pieces are [cut, next cut): a byte at a cut belongs to the piece that begins there.
        first, last = np.searchsorted(self.cuts, [start, stop - 1], side="right").tolist()
        return range(first - 1, last)

    def rows(self, node_id: NodeId, coords: Sequence[int]) -> range:
        """Return where a reference is, if it is there: rows of its array."""
        fences = self.arrays.get(node_id)
        if fences is None or fences.coords.shape[1] != len(coords):
            return range(0)
        low, high = 0, len(fences.coords)
        while low < high:
            middle = (low + high) // 2
            if tuple(fences.coords[middle].tolist()) <= tuple(coords):
                low = middle + 1
            else:
                high = middle
        # `low` is the number of fences that are not above the wanted one. Steps of 4: with 2 such
        # fences it is in rows [4, 8), with none in no row, if the order is right.
        return range(max(low - 1, 0) * self.step, min(low * self.step, fences.count))

    def likely(self, node_id: NodeId, rows: range) -> list[int]:
        """Guess which pieces a search among these rows will want; a wrong guess only costs time."""
        fences = self.arrays.get(node_id)
        if fences is None or not rows:
            return []
        # In the payload: `decode` refuses arrays that end outside of it.
        entries = (fences.first + 4 * rows.start, fences.first + 4 * rows.stop)
        # The root and arrays lie at the start, so piece 0; then the vtable, the first table and its
        # location.
        wanted = {0, fences.shape, *fences.pieces[rows.start // self.step].tolist()}
        wanted |= set(self.covering(*entries))
        return sorted(piece for piece in wanted if piece < len(self))


def index_size(data: bytes | memoryview) -> int | None:
    """Return the size of the index at the end of an object; None if it has no index.

    Args:
        data: the end of the object, at least `TRAILER_BYTES`.
    """
    if len(data) < _TRAILER.size:
        return None
    *_, size, _, magic = _TRAILER.unpack(memoryview(data)[-_TRAILER.size :])
    found: int = size
    return found if magic == _MAGIC else None


class _Reader:
    """Takes an index apart, within bounds."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._position = 0

    def take(self, size: int) -> npt.NDArray[Any]:
        """Return the next bytes."""
        start = self._position
        self._position += size
        if self._position > len(self._body):
            raise _damaged("it is too short")
        return np.frombuffer(self._body[start : self._position], np.uint8)

    def array(self, step: int) -> tuple[NodeId, ArrayFences]:
        """Read the fences of an array."""
        head = _ARRAY.unpack(self.take(_ARRAY.size).tobytes())
        node_id, first, count, rank, num_fences, shape = head
        # One fence for each step, of which the last may be cut short: `pieces` has a row for each
        # step that `rows` can name.
        if rank > _MAX_RANK or num_fences != -(-count // step):
            raise _damaged("an array makes no sense")
        coords = self.take(4 * num_fences * rank).view("<u4").reshape(num_fences, rank)
        pieces = self.take(8 * num_fences).view("<u4").reshape(num_fences, 2)
        return NodeId(node_id), ArrayFences(first, count, coords, pieces, shape)


def _checksum(body: bytes | memoryview, numbers: Sequence[int]) -> int:
    # Of the trailer, too, with a zero in place of the checksum.
    return zlib.crc32(_TRAILER.pack(*numbers, 0, _MAGIC), zlib.crc32(body))


def _running(sizes: npt.NDArray[Any], start: int) -> Column:
    sums: Column = np.concatenate([[start], start + np.cumsum(sizes, dtype=np.int64)])
    return sums


def _damaged(why: str) -> FormatError:
    return FormatError(f"The index of a seekable manifest is of no use: {why}.")
