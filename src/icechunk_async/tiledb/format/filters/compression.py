"""Compressors: each turns pieces of a stream into smaller ones.

Before the pieces of data come those of the streams that earlier filters left beside it. The
metadata of a compressor says how many pieces there are and the sizes of each.
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
from icechunk_async.tiledb.format.filters.delta import undelta, undouble_delta
from icechunk_async.tiledb.format.filters.pipeline import FilterCode
from icechunk_async.tiledb.format.types import stored_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.tiledb.format.types import Datatype

__all__ = ["decompress", "decompress_zstd"]

_SIZE: Final = Struct("<i")
_UNKNOWN_SIZE: Final = (1 << 64) - 1
_MOST_LZ4: Final = (1 << 31) - 1


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
            return lambda piece, plain: undelta(piece, plain, dtype)
        case _:
            dtype = stored_dtype(datatype)
            return lambda piece, plain: undouble_delta(piece, plain, dtype)


def _gzip(piece: memoryview, plain: int) -> memoryview:
    """Decompress a zlib stream (RFC 1950)."""
    stream = zlib.decompressobj()
    try:
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
        declared = zstandard.get_frame_parameters(piece).content_size
        if declared not in (plain, _UNKNOWN_SIZE):
            raise _damaged(FilterCode.ZSTD, f"a frame claims {declared} bytes and not {plain}")
        if not plain:
            return memoryview(b"")
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
