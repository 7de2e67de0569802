"""The rows of a chunk: put into arrays, or handed to the commit, which joins them with others'.

Any task may have rows of any chunk. A task stores the chunks that it has whole. Of others it hands
over which cells its rows fill, and their values too unless it has stored the chunk as well. Few
rows travel with its answer; more are stored as objects that nothing refers to, which garbage
collection removes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgpack
import numpy as np
import zstandard

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import decompress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt
    import zarr

    from icechunk_async.format.manifest.chunk import NativeChunk
    from icechunk_async.spark.grid import Block, ChunkGrid

    type Ints = npt.NDArray[np.int64]

__all__ = ["PartWriter", "Parts", "block_rows", "put_block"]

_INLINE_BYTES: Final = 1 << 18
"""Rows of a task that travel with its answer: Spark bounds the answers of all tasks together."""
# What the commit reads of all tasks at a time (`_GROUP_BYTES` there).
_OBJECT_BYTES: Final = 32 << 20


async def put_block(
    arrays: Mapping[str, zarr.Array[Any]],
    grid: ChunkGrid,
    block: Block,
    old: tuple[int, int] | None,
) -> None:
    """Write a chunk of every array once; cells without a row keep their values.

    Args:
        arrays: the arrays by name.
        grid: their common chunk grid.
        block: the rows of the chunk.
        old: the axis that is appended to, and its length before. Cells beyond that length had no
            value, although the chunk may hold some from when the array was longer.
    """
    region = grid.region(block.chunk)
    shape = tuple(at.stop - at.start for at in region)

    async def put(name: str) -> None:
        # Zarr's own loop runs all arrays of the chunk at once.
        array = arrays[name].async_array
        values: npt.NDArray[Any]
        # A chunk whose cells all have rows need not be read.
        if block.whole:
            values = np.empty(shape, array.dtype)
        else:
            values = np.array(await array.getitem(region))
        if old is not None and not block.whole:
            axis, length = old
            new = slice(max(0, length - region[axis].start), None)
            values[(*[slice(None)] * axis, new)] = array.metadata.fill_value
        values.reshape(-1)[block.cells] = block.values[name]
        await array.setitem(region, values)

    await bounded_map(put, list(arrays), limit=len(arrays))


@dataclass(frozen=True, slots=True)
class Parts:
    """The chunks of one task; plain data.

    Attributes:
        whole: numbers of the chunks that it stored with a row for every cell, ascending.
        chunks: numbers of the chunks with rows for some cells, ascending.
        stored: which of these it also stored, with its rows and what was there before.
        pieces: the rows of these, in blocks: bytes, or the objects that hold them.
        piece: for each chunk the number of the piece with its block.
        spans: first byte and end of each block in its piece; `(n, 2)`.
    """

    whole: Ints
    chunks: Ints
    stored: npt.NDArray[np.bool_]
    pieces: tuple[bytes | NativeChunk, ...]
    piece: npt.NDArray[np.int32]
    spans: Ints


class PartWriter:
    """Gathers the blocks of a task, in ascending order of their chunks."""

    def __init__(self, store: Callable[[bytes], NativeChunk]) -> None:
        """Begin without blocks; `store` stores an object."""
        self._store = store
        self._open = bytearray()
        self._pieces: list[bytes | NativeChunk] = []
        self._rows: list[tuple[int, bool, int, int, int]] = []

    def add(self, block: Block, *, stored: bool) -> None:
        """Add the rows of a chunk; without their values if the task stored the chunk."""
        # Stored values are read back from the chunk if they are needed, and are not sent twice.
        data = _packed(block, {} if stored else block.values)
        if self._open and len(self._open) + len(data) > _OBJECT_BYTES:
            self._flush()
        start = len(self._open)
        self._open += data
        # Read by position in `finish`: chunk, stored, piece, first byte, end.
        self._rows.append((block.chunk, stored, len(self._pieces), start, len(self._open)))

    def finish(self, whole: list[int]) -> Parts:
        """Return all blocks, with the numbers of whole chunks."""
        if self._pieces or len(self._open) > _INLINE_BYTES:
            self._flush()
        elif self._open:
            self._pieces.append(bytes(self._open))
        rows = np.array(self._rows, np.int64).reshape(-1, 5)
        return Parts(
            np.array(sorted(whole), np.int64),
            rows[:, 0].copy(),
            rows[:, 1].astype(np.bool_),
            tuple(self._pieces),
            rows[:, 2].astype(np.int32),
            rows[:, 3:].copy(),
        )

    def _flush(self) -> None:
        self._pieces.append(self._store(bytes(self._open)))
        self._open = bytearray()


def _packed(block: Block, values: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return rows by ascending cell, compressed."""
    # Ascending cells have small steps, which compress, and `block_rows` checks two ends in place of
    # all cells.
    order = np.argsort(block.cells, kind="stable")
    document = {
        "cells": block.cells[order].astype("<i8").tobytes(),
        "values": {name: _column(given[order]) for name, given in values.items()},
    }
    return zstandard.ZstdCompressor(level=1).compress(msgpack.packb(document))


def _column(values: npt.NDArray[Any]) -> bytes | list[str | bytes]:
    return values.tolist() if values.dtype.kind in {"O", "T"} else values.tobytes()


def block_rows(
    data: bytes | memoryview, size: int, dtypes: Mapping[str, np.dtype[Any]]
) -> tuple[Ints, dict[str, npt.NDArray[Any]] | None]:
    """Return the cells of a block, ascending, and the values of each array; None if it has none.

    Args:
        data: the block.
        size: how many cells its chunk has.
        dtypes: the type of each array.

    Raises:
        FormatError: it is not what a task of this write handed over.
    """
    try:
        # Objects come from storage, where they may be damaged: bounded and checked like any
        # metadata.
        document = msgpack.unpackb(bytes(decompress(memoryview(data), "block of rows")))
        cells = np.frombuffer(document["cells"], "<i8").astype(np.int64)
        given: dict[str, Any] = document["values"]
        values = {it: _stored(given[it], dtypes[it]) for it in dtypes} if given else None
    except (KeyError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise FormatError(f"Rows that a task handed over are damaged: {error!r}.") from error
    if len(cells) and not (cells[0] >= 0 and cells[-1] < size and (np.diff(cells) >= 0).all()):
        raise FormatError("Rows that a task handed over are outside of their chunk.")
    if values is not None and any(len(it) != len(cells) for it in values.values()):
        raise FormatError("Rows that a task handed over lack values.")
    return cells, values


def _stored(column: bytes | list[str | bytes], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if isinstance(column, bytes):
        return np.frombuffer(column, dtype)
    return np.array(column, object).astype(dtype)
