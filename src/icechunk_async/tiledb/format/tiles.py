"""Tiles: the container of every tile, and generic tiles, which describe themselves.

A tile is a list of chunks, each of which went through the filters by itself. A generic tile has a
header with its sizes and its filters; schemas, metadata and the parts of a fragment's metadata are
stored as such.
"""

from __future__ import annotations

import hashlib
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, UnsupportedFeatureError
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.filters.compression import decompress
from icechunk_async.tiledb.format.filters.numbers import unreduce_widths, unscale, unsum, unxor
from icechunk_async.tiledb.format.filters.pipeline import (
    COMPRESSORS,
    Filter,
    FilterCode,
    Filters,
    decode_pipeline,
    has_width_header,
    input_types,
)
from icechunk_async.tiledb.format.filters.shuffle import unshuffle_bits, unshuffle_bytes
from icechunk_async.tiledb.format.filters.strings import folds_offsets, unfold_strings
from icechunk_async.tiledb.format.types import Datatype, stored_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["GenericTile", "TileForm", "decode_generic", "generic_length", "open_generic"]

_CHUNK_HEAD_BYTES: Final = 12
_MAX_RATIO: Final = 2000
_FLOOR_BYTES: Final = 64 << 20
_OFFSETS_BYTES: Final = 256 << 20
_MAX_GENERIC_RATIO: Final = 1100
"""Deflate, with which generic tiles are compressed, does not exceed 1032 to 1."""
# Streams between two filters may be larger than the values: float scale stores a float32 in up to 8
# bytes, and shuffles and windows add their metadata.
_SLACK: Final = 16
_SLACK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TileForm:
    """How the tiles of one file of a field are encoded."""

    filters: Filters
    datatype: Datatype
    """Type of the values."""
    cell_bytes: int
    """Bytes of a cell, or of a value if cells have variable length."""
    version: int
    """Format version of the fragment."""
    is_variable: bool = False
    """Whether these are the values of cells of variable length."""
    _types: tuple[Datatype, ...] = field(init=False, repr=False, compare=False)
    _folds: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Work out the type that each filter works on.

        Raises:
            UnsupportedFeatureError: a filter is not supported.
            FormatError: a filter cannot work on its type.
        """
        folds = self.is_variable and folds_offsets(self.filters, self.datatype, self.version)
        object.__setattr__(self, "_folds", folds)
        object.__setattr__(self, "_types", input_types(self.filters, self.datatype))
        if any(it.code is FilterCode.DICTIONARY for it in self.filters[folds:]):
            raise FormatError(
                "A TileDB array has a dictionary filter in a place where it cannot be: it must be "
                "the first one, on text. The schema is damaged."
            )

    @property
    def folds_offsets(self) -> bool:
        """Whether tiles hold the offsets of their cells as well."""
        return self._folds

    def decode(self, tile: bytes | memoryview, plain: int) -> npt.NDArray[np.uint8]:
        """Return the plain bytes of a tile whose size is known.

        Args:
            tile: its stored bytes, and nothing else.
            plain: its plain size.

        Raises:
            FormatError: it is damaged, or has another size.
        """
        found = self._decode(memoryview(tile), plain)
        if len(found) != plain:
            raise _damaged(f"it holds {len(found)} bytes, not {plain}")
        return found

    def decode_strings(
        self, tile: bytes | memoryview, plain: int, cells: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        """Return the plain bytes of a tile that holds its offsets, and the offsets.

        Args:
            tile: its stored bytes.
            plain: its plain size.
            cells: the number of its cells.

        Raises:
            FormatError: it is damaged, or has other sizes.
        """
        # Not by the size of the tile alone: ten million equal cells of one letter take 6 KB.
        if 8 * cells > max(_OFFSETS_BYTES, _believed(tile)):
            raise _damaged(f"{len(tile)} bytes claim to hold {cells} cells")
        parts: list[memoryview] = []
        offsets: list[npt.NDArray[np.uint64]] = []
        total, left_cells = 0, cells
        # Each chunk counts its offsets from its own beginning.
        for size, meta, data in _chunks(memoryview(tile), plain):
            limit = size * _SLACK + _SLACK_BYTES
            meta_left, left = self._undo(self.filters[1:], self._types[1:], meta, data, limit)
            # The filter that folds offsets is the first, so what the others leave is its own.
            code = self.filters[0].code
            part, starts = unfold_strings(code, meta_left, left, cells=left_cells, limit=limit)
            if len(part) != size:
                raise _damaged(f"a chunk holds {len(part)} bytes, not {size}")
            parts.append(part)
            offsets.append(starts + np.uint64(total))
            total, left_cells = total + size, left_cells - len(starts)
        found = np.frombuffer(b"".join(parts), np.uint8)
        starts = np.concatenate(offsets) if offsets else np.zeros(0, np.uint64)
        if total != plain or len(starts) != cells:
            raise _damaged(f"it holds {len(starts)} cells in {total} bytes")
        return found, starts

    def _decode(self, tile: memoryview, limit: int) -> npt.NDArray[np.uint8]:
        chunks = _chunks(tile, limit)
        if len(chunks) == 1:
            size, meta, data = chunks[0]
            return np.frombuffer(self._chunk(size, meta, data), np.uint8)
        found = np.empty(sum(size for size, _, _ in chunks), np.uint8)
        at = 0
        for size, meta, data in chunks:
            found[at : at + size] = np.frombuffer(self._chunk(size, meta, data), np.uint8)
            at += size
        return found

    def _chunk(self, size: int, meta: memoryview, data: memoryview) -> memoryview:
        limit = size * _SLACK + _SLACK_BYTES
        rest, found = self._undo(self.filters, self._types, meta, data, limit)
        # A filter that read too little would leave the metadata of the one before it to be misread.
        if len(rest):
            raise _damaged(f"{len(rest)} bytes of its filters' metadata are left")
        if len(found) != size:
            raise _damaged(f"a chunk holds {len(found)} bytes, not {size}")
        return found

    def _undo(
        self,
        filters: Filters,
        types: tuple[Datatype, ...],
        meta: memoryview,
        data: memoryview,
        limit: int,
    ) -> tuple[memoryview, memoryview]:
        """Undo filters from the last to the first; return what is left of the metadata, and data.

        A filter reads its metadata from the front, and what is left belongs to the one before.
        Compressors have swallowed that of the filters before them.
        """
        for it, datatype in zip(reversed(filters), reversed(types), strict=True):
            meta, data = self._undo_one(it, datatype, meta, data, limit)
        return meta, data

    def _undo_one(
        self, it: Filter, datatype: Datatype, meta: memoryview, data: memoryview, limit: int
    ) -> tuple[memoryview, memoryview]:
        dtype = stored_dtype(datatype)
        match it.code:
            case code if code in COMPRESSORS:
                return decompress(
                    code,
                    meta,
                    data,
                    datatype=datatype,
                    cell_bytes=self.cell_bytes,
                    limit=limit,
                )
            case FilterCode.BYTESHUFFLE:
                return unshuffle_bytes(meta, data, dtype.itemsize)
            case FilterCode.BITSHUFFLE:
                return unshuffle_bits(meta, data, dtype.itemsize)
            # The version that decides is the fragment's: the schema may be older or newer.
            case FilterCode.BIT_WIDTH_REDUCTION:
                if has_width_header(datatype, self.version):
                    return unreduce_widths(meta, data, dtype, limit)
                return meta, data
            case FilterCode.POSITIVE_DELTA:
                if has_width_header(datatype, self.version):
                    return unsum(meta, data, dtype, limit)
                return meta, data
            case FilterCode.XOR:
                return unxor(meta, data, dtype.itemsize)
            case FilterCode.FLOAT_SCALE:
                return unscale(it, meta, data, dtype, limit)
            case _:
                return _verify_digests(it.code, meta, data), data


def _chunks(tile: memoryview, limit: int) -> list[tuple[int, memoryview, memoryview]]:
    """Return plain size, metadata and data of each chunk of a tile.

    Raises:
        FormatError: the chunks are not the whole tile, or claim more than ``limit`` or than is
            believed of a tile of this size.
    """
    cursor = Cursor(tile, "tile")
    number = cursor.count(cursor.u64(), _CHUNK_HEAD_BYTES, "chunks")
    # This many bytes are allocated before any is decoded. A limit alone would not do: it comes from
    # the schema, in which a few bytes can claim tiles of any extent.
    most = min(limit, _believed(tile))
    found: list[tuple[int, memoryview, memoryview]] = []
    total = 0
    for _ in range(number):
        size, stored, beside = cursor.u32(), cursor.u32(), cursor.u32()
        meta = cursor.take(beside)
        found.append((size, meta, cursor.take(stored)))
        total += size
        if total > most:
            raise cursor.damaged(f"its chunks claim {total} bytes, and {most} are believed")
    cursor.finish()
    return found


def _believed(tile: bytes | memoryview) -> int:
    """Return the most plain bytes that a tile of this size is believed to hold."""
    return max(_FLOOR_BYTES, _MAX_RATIO * len(tile))


def _verify_digests(code: FilterCode, meta: memoryview, data: memoryview) -> memoryview:
    """Check the digests of what follows in the metadata, and of the data; return what follows.

    Raises:
        FormatError: a digest is another one, or the bytes are damaged.
    """
    name = code.name.lower()
    cursor = Cursor(meta, f"{name} metadata")
    parts, values = cursor.u32(), cursor.u32()
    # Against accidents, not attacks: where policy forbids MD5, it may still be used for this.
    size = hashlib.new(name, usedforsecurity=False).digest_size
    total = cursor.count(parts + values, 8 + size, "digests")
    records = [(cursor.u64(), bytes(cursor.take(size))) for _ in range(total)]
    rest = cursor.rest()
    for stream, entries in ((rest, records[:parts]), (data, records[parts:])):
        at = 0
        for length, digest in entries:
            part = stream[at : at + length]
            found = hashlib.new(name, part, usedforsecurity=False).digest()
            if len(part) != length or found != digest:
                raise FormatError(
                    f"A tile of a TileDB array is damaged: its {name} digest is another one."
                )
            at += length
        if at != len(stream):
            raise cursor.damaged(f"its digests cover {at} of {len(stream)} bytes")
    return rest


@dataclass(frozen=True, slots=True)
class GenericTile:
    """The header of a generic tile."""

    version: int
    stored: int
    """Bytes of its body."""
    plain: int
    filters: Filters
    length: int
    """Bytes of the header."""

    def body(self, data: bytes | memoryview) -> bytes:
        """Return the plain bytes, given those of the body.

        Raises:
            FormatError: they are damaged.
        """
        if self.plain > max(_SLACK_BYTES, _MAX_GENERIC_RATIO * self.stored):
            raise _damaged(f"{self.stored} bytes claim to hold {self.plain}")
        form = TileForm(self.filters, Datatype.CHAR, 1, self.version)
        found: Any = form.decode(data, self.plain)
        return bytes(found)


def open_generic(data: bytes | memoryview, what: str) -> GenericTile:
    """Read the header of the generic tile that some bytes begin with; they need not have the body.

    Args:
        data: the bytes.
        what: how messages call them.

    Raises:
        FormatError: the header is damaged, or incomplete.
        UnsupportedFeatureError: the tile is encrypted.
    """
    cursor = Cursor(data, what)
    version, stored, plain = cursor.u32(), cursor.u64(), cursor.u64()
    kind, cell_bytes, encryption = cursor.u8(), cursor.u64(), cursor.u8()
    if encryption:
        raise UnsupportedFeatureError(
            f"The {what} of a TileDB array is encrypted, and encrypted arrays are not supported. "
            "Write the array anew without encryption, with TileDB.",
            feature="encryption",
        )
    # Both are fields of every header and never vary, so they tell other files from this one.
    if kind != Datatype.CHAR or cell_bytes != 1:
        raise cursor.damaged(f"it does not begin as such a file does (type {kind})")
    pipeline = Cursor(cursor.bytes32(), "filter pipeline")
    filters = decode_pipeline(pipeline)
    return GenericTile(version, stored, plain, filters, cursor.position)


def generic_length(data: bytes | memoryview, what: str) -> int:
    """Return the length of the generic tile that some bytes begin with, header included."""
    tile = open_generic(data, what)
    return tile.length + tile.stored


def decode_generic(data: bytes | memoryview, what: str, *, exact: bool = True) -> bytes:
    """Return the contents of a generic tile.

    Args:
        data: its bytes.
        what: how messages call it.
        exact: whether the tile must be all of the bytes, and not only their beginning.

    Raises:
        FormatError: it is damaged.
        UnsupportedFeatureError: it is encrypted.
    """
    view = memoryview(data)
    tile = open_generic(view, what)
    end = tile.length + tile.stored
    if len(view) < end or (exact and len(view) > end):
        raise FormatError(
            f"The {what} of a TileDB array is damaged: it should have {end} bytes, and has "
            f"{len(view)}."
        )
    try:
        return tile.body(view[tile.length : end])
    except FormatError as error:
        error.add_note(f"It was the {what} of a TileDB array.")
        raise


def _damaged(why: str) -> FormatError:
    return FormatError(f"A tile of a TileDB array is damaged: {why}.")
