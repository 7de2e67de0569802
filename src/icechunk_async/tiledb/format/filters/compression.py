"""Compressors, delta and double delta among them: each makes pieces of a stream smaller.

Before the pieces of data come those of the streams that earlier filters left beside it. The
metadata of a compressor says how many pieces there are and the sizes of each. Deltas are
differences, which wrap at the width of their type.
"""

from __future__ import annotations

import bz2
import threading
import zlib
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zstandard
from numcodecs import lz4

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.filters.pipeline import FilterCode
from icechunk_async.tiledb.format.types import stored_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from icechunk_async.tiledb.format.types import Datatype

__all__ = ["decompress", "decompress_zstd", "running_sum"]

_SIZE: Final = Struct("<i")
_UNKNOWN_SIZE: Final = (1 << 64) - 1
_MOST_LZ4: Final = (1 << 31) - 1
_MOST_BITS: Final = 63


class _Contexts(threading.local):
    """A decompressor of this thread: making one takes longer than decompressing a small piece."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor()


_contexts: Final = _Contexts()


def decompress(
    code: FilterCode,
    meta: memoryview,
    data: memoryview,
    *,
    datatype: Datatype,
    cell_bytes: int,
    limit: int,
) -> tuple[memoryview, memoryview]:
    """Undo a compressor.

    Args:
        code: which one.
        meta: its metadata, and nothing else.
        data: its output.
        datatype: type of the values; for delta and double delta.
        cell_bytes: bytes of a cell; for run length encoding.
        limit: the maximum of decompressed bytes.

    Returns:
        The metadata and the data of the filter before it.

    Raises:
        FormatError: the bytes are damaged, or would become more than the limit.
    """
    cursor = Cursor(meta, f"{code.name} metadata")
    parts, values = cursor.u32(), cursor.u32()
    total = cursor.count(parts + values, 8, "pieces")
    # As int64: the sum of sizes of 32 bits does not fit 32 bits.
    sizes = cursor.array("<u4", 2 * total).reshape(total, 2).astype(np.int64)
    if cursor.remaining:
        raise cursor.damaged("bytes follow the sizes of its pieces")
    if int(sizes[:, 0].sum()) > limit:
        raise FormatError(
            f"A tile of a TileDB array claims to decompress to {int(sizes[:, 0].sum())} bytes, "
            f"and at most {limit} are believed. The file is damaged."
        )
    if int(sizes[:, 1].sum()) != len(data):
        raise FormatError(
            f"The compressed pieces of a tile of a TileDB array take {int(sizes[:, 1].sum())} "
            f"bytes, and {len(data)} are there. The file is damaged."
        )
    undo = _undo_of(code, datatype, cell_bytes)
    found: list[memoryview] = []
    at = 0
    for plain, stored in sizes.tolist():
        piece = undo(data[at : at + stored], plain)
        if len(piece) != plain:
            raise _damaged(code, f"a piece has {len(piece)} bytes and not {plain}")
        found.append(piece)
        at += stored
    return _joined(found[:parts]), _joined(found[parts:])


def _joined(parts: list[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _damaged(code: FilterCode, why: str) -> FormatError:
    return FormatError(
        f"A tile of a TileDB array, compressed with {code.name.lower()}, is damaged: {why}."
    )


def _undo_of(
    code: FilterCode, datatype: Datatype, cell_bytes: int
) -> Callable[[memoryview, int], memoryview]:
    """Return the function that decompresses one piece, given its plain size."""
    match code:
        case FilterCode.GZIP:
            return _gzip
        case FilterCode.ZSTD:
            return decompress_zstd
        case FilterCode.LZ4:
            return _lz4
        case FilterCode.BZIP2:
            return _bzip2
        case FilterCode.RLE:
            return lambda piece, plain: _runs(piece, plain, cell_bytes)
        case FilterCode.DELTA:
            dtype = stored_dtype(datatype)
            return lambda piece, plain: _undelta(piece, plain, dtype)
        case _:
            dtype = stored_dtype(datatype)
            return lambda piece, plain: _undouble_delta(piece, plain, dtype)


def _gzip(piece: memoryview, plain: int) -> memoryview:
    """Decompress a zlib stream (RFC 1950)."""
    # Not `zlib.decompress`, which makes all of a stream however long it is.
    stream = zlib.decompressobj()
    try:
        # A byte more than there should be shows that a stream is longer, without all of it.
        found = stream.decompress(piece, plain + 1)
    except zlib.error as error:
        raise _damaged(FilterCode.GZIP, str(error)) from error
    if not stream.eof:
        raise _damaged(FilterCode.GZIP, "a stream does not end where it should")
    return memoryview(found)


def _bzip2(piece: memoryview, plain: int) -> memoryview:
    stream = bz2.BZ2Decompressor()
    try:
        found = stream.decompress(piece, plain + 1)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(FilterCode.BZIP2, str(error)) from error
    return memoryview(found)


def decompress_zstd(piece: memoryview, plain: int) -> memoryview:
    """Decompress a Zstandard frame of a known size.

    Raises:
        FormatError: it is damaged, or claims another size.
    """
    try:
        # The library allocates what a frame declares, whatever it is told to return at most.
        declared = zstandard.get_frame_parameters(piece).content_size
        if declared not in (plain, _UNKNOWN_SIZE):
            raise _damaged(FilterCode.ZSTD, f"a frame claims {declared} bytes and not {plain}")
        if not plain:
            return memoryview(b"")
        # Frames without a declared size are cut by this limit.
        found = _contexts.zstd.decompress(piece, max_output_size=plain)
    except (zstandard.ZstdError, MemoryError) as error:
        raise _damaged(FilterCode.ZSTD, str(error)) from error
    return memoryview(found)


def _lz4(piece: memoryview, plain: int) -> memoryview:
    if not plain:
        return memoryview(b"")
    if plain > _MOST_LZ4:
        raise _damaged(FilterCode.LZ4, f"a block claims {plain} bytes")
    try:
        # The codec wants the size before the block, as it writes it itself.
        found: Any = lz4.decompress(_SIZE.pack(plain) + piece)
    except RuntimeError as error:
        raise _damaged(FilterCode.LZ4, str(error)) from error
    return memoryview(found).cast("B")


def _runs(piece: memoryview, plain: int, cell_bytes: int) -> memoryview:
    """Expand runs: the bytes of a cell, and a count in two bytes, the higher one first."""
    records, rest = divmod(len(piece), cell_bytes + 2)
    if rest or (not records and plain):
        raise _damaged(FilterCode.RLE, "its runs are cut off")
    table = np.frombuffer(piece, np.uint8).reshape(records, cell_bytes + 2)
    counts = table[:, cell_bytes:].copy().view(">u2").reshape(records).astype(np.int64)
    if int(counts.sum()) * cell_bytes != plain:
        raise _damaged(FilterCode.RLE, f"its runs do not make {plain} bytes")
    cells = np.ascontiguousarray(table[:, :cell_bytes]).view(f"V{cell_bytes}").reshape(records)
    return memoryview(np.repeat(cells, counts)).cast("B")


def _undelta(piece: memoryview, plain: int, dtype: np.dtype[Any]) -> memoryview:
    """Undo delta: a count, then the first value and the differences between neighbours.

    Args:
        piece: the stored bytes.
        plain: bytes of the values.
        dtype: type of the values, of integers.

    Raises:
        FormatError: the bytes are damaged, or a part of the values was dropped when they were
            written.
    """
    cursor = Cursor(piece, "delta stream")
    _check_count("delta", cursor.u64(), plain, dtype)
    found = running_sum(cursor.array(dtype, plain // dtype.itemsize))
    if cursor.remaining > dtype.itemsize:  # TileDB 2.16 wrote one value too many
        cursor.finish()
    return memoryview(found).cast("B")


def _undouble_delta(piece: memoryview, plain: int, dtype: np.dtype[Any]) -> memoryview:
    """Undo double delta: differences of differences, in as few bits as the largest one takes.

    Args:
        piece: the stored bytes.
        plain: bytes of the values.
        dtype: type of the values, of integers.

    Raises:
        FormatError: as `_undelta`.
    """
    cursor = Cursor(piece, "double delta stream")
    bits, number = cursor.u8(), cursor.u64()
    _check_count("double delta", number, plain, dtype)
    if bits >= dtype.itemsize * 8 - 1:
        # Differences that would take the bits of whole values are not stored: these follow.
        raw = cursor.take(plain)
        cursor.finish()
        return raw
    found = np.zeros(number, np.int64)
    first = cursor.array(dtype, min(number, 2)).astype(np.int64)
    found[: len(first)] = first
    if number > 2:
        # Two running sums undo differences of differences; int64 wraps, as where they were made.
        found[1] -= found[0]
        found[2:] = _signed_fields(cursor, bits, number - 2)
        np.cumsum(found[1:], out=found[1:])
        np.cumsum(found, out=found)
    cursor.finish()
    return memoryview(found.astype(dtype, copy=False)).cast("B")


def _signed_fields(cursor: Cursor, bits: int, number: int) -> npt.NDArray[np.int64]:
    """Read numbers of a sign bit and ``bits`` bits, packed from the highest bit of each word on."""
    if bits > _MOST_BITS - 1:
        raise cursor.damaged(f"its differences have {bits} bits")
    width = bits + 1
    # Three fields of 1 + 4 bits: the first from bit 63 down to 59, of which 63 is the sign.
    words = cursor.array("<u8", -(-number * width // 64))
    places = np.arange(number, dtype=np.int64) * width
    index = places >> 6
    shift = (places & 63).astype(np.uint64)
    found = words[index] << shift
    # Some fields continue in the next word. A shift by 64 is undefined, so it is done in two.
    beyond = np.minimum(index + 1, len(words) - 1)
    found |= (words[beyond] >> np.uint64(1)) >> (np.uint64(63) - shift)
    # Each field stood at the top of its word; what came behind it goes.
    found >>= np.uint64(64 - width)
    sizes = (found & np.uint64((1 << bits) - 1)).astype(np.int64)
    signed: npt.NDArray[np.int64] = np.where(found >> np.uint64(bits) != 0, -sizes, sizes)
    return signed


def running_sum(values: npt.NDArray[Any], axis: int = 0) -> npt.NDArray[Any]:
    """Return sums of integers along an axis, which wrap at the width of their type."""
    # Unsigned, as sums of signed integers that overflow are undefined in C.
    unsigned = values.view(f"<u{values.dtype.itemsize}")
    sums = np.cumsum(unsigned, axis=axis, dtype=unsigned.dtype)
    return sums.view(values.dtype)


def _check_count(name: str, number: int, plain: int, dtype: np.dtype[Any]) -> None:
    if number * dtype.itemsize != plain:
        raise FormatError(
            f"A tile of a TileDB array holds {number} values of {dtype.itemsize} bytes after "
            f"{name}, and {plain} bytes were written. TileDB itself drops what is no whole value, "
            f"where {name} follows another filter; such data cannot be recovered. Write the array "
            f"anew with {name} as the first filter."
        )
