"""Filters that change single numbers: bit width reduction, positive delta, xor, float scale.

The first two divide a chunk into windows of some hundred bytes, each with its own base. Windows
that are alike are handled together, as the rows of a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.filters.compression import running_sum

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from icechunk_async.tiledb.format.filters.pipeline import Filter

__all__ = ["unreduce_widths", "unscale", "unsum", "unxor"]

_WIDTHS: Final = (8, 16, 32, 64)


def unreduce_widths(
    meta: memoryview, data: memoryview, dtype: np.dtype[Any], limit: int
) -> tuple[memoryview, memoryview]:
    """Undo bit width reduction: differences from the least value of a window, in fewer bits.

    Args:
        meta: metadata that begins with that of the filter.
        data: its output.
        dtype: type of the values, of integers.
        limit: the maximum of bytes of the result.

    Returns:
        The rest of the metadata, and the data.

    Raises:
        FormatError: the bytes are damaged.
    """
    if dtype.itemsize == 1:  # nothing to reduce, so the filter does nothing
        return meta, data
    cursor = Cursor(meta, "bit width reduction metadata")
    plain = cursor.u32()
    record = np.dtype([("base", dtype), ("bits", "u1"), ("size", "<u4")])
    windows = cursor.array(record, cursor.u32())
    sizes = windows["size"].astype(np.int64)
    widths = windows["bits"].astype(np.int64)
    _check_total("bit width reduction", int(sizes.sum()), plain, limit)
    # Windows that would not get smaller, or hold part of a value, were stored unchanged.
    raw = (widths >= 8 * dtype.itemsize) | (sizes % dtype.itemsize != 0)
    if not np.isin(widths[~raw], _WIDTHS).all():
        raise cursor.damaged(f"a window has numbers of {widths[~raw].max(initial=0)} bits")
    stored = np.where(raw, sizes, sizes // dtype.itemsize * (widths // 8))
    if int(stored.sum()) != len(data):
        raise cursor.damaged(f"its windows take {int(stored.sum())} of {len(data)} bytes")
    source = np.frombuffer(data, np.uint8)
    found = np.empty(plain, np.uint8)
    starts, places = _before(stored), _before(sizes)
    kinds = np.where(raw, 0, widths)
    for rows in _alike(kinds, sizes):
        size, width = int(sizes[rows[0]]), int(kinds[rows[0]])
        table = _gather(source, starts[rows], int(stored[rows[0]]))
        if width:
            small = np.dtype(f"<{dtype.kind}{width // 8}")
            # Signed types have signed differences, so the small type has the kind of the large one.
            values = table.view(small).astype(dtype) + windows["base"][rows][:, None]
            table = values.view(np.uint8)
        _scatter(found, places[rows], table.reshape(len(rows), size))
    return cursor.rest(), memoryview(found)


def unsum(
    meta: memoryview, data: memoryview, dtype: np.dtype[Any], limit: int
) -> tuple[memoryview, memoryview]:
    """Undo positive delta: differences between neighbours within a window, and its first value.

    Args, returns and raises: as `unreduce_widths`.
    """
    cursor = Cursor(meta, "positive delta metadata")
    record = np.dtype([("base", dtype), ("size", "<u4")])
    windows = cursor.array(record, cursor.u32())
    sizes = windows["size"].astype(np.int64)
    _check_total("positive delta", int(sizes.sum()), len(data), limit)
    if (sizes % dtype.itemsize).any():
        raise cursor.damaged("a window is no whole number of values")
    source = np.frombuffer(data, np.uint8)
    found = np.empty(len(data), np.uint8)
    starts = _before(sizes)
    for rows in _alike(sizes, sizes):
        table = _gather(source, starts[rows], int(sizes[rows[0]])).view(dtype)
        # A window begins with the difference to its base, so the base is added to all of its sums.
        values = running_sum(table, axis=1) + windows["base"][rows][:, None]
        _scatter(found, starts[rows], values.view(np.uint8))
    return cursor.rest(), memoryview(found)


def unxor(meta: memoryview, data: memoryview, width: int) -> tuple[memoryview, memoryview]:
    """Undo xor of neighbours.

    Args:
        meta: metadata that begins with that of the filter.
        data: its output.
        width: bytes of a value.

    Returns:
        The rest of the metadata, and the data.

    Raises:
        FormatError: the bytes are damaged.
    """
    cursor = Cursor(meta, "xor metadata")
    lengths = _lengths(cursor, data, width)
    source = np.frombuffer(data, f"<u{width}")
    found = np.empty_like(source)
    at = 0
    # Each part begins anew with a whole value.
    for length in lengths:
        end = at + length // width
        np.bitwise_xor.accumulate(source[at:end], out=found[at:end])
        at = end
    return cursor.rest(), memoryview(found).cast("B")


def unscale(
    it: Filter, meta: memoryview, data: memoryview, dtype: np.dtype[Any], limit: int
) -> tuple[memoryview, memoryview]:
    """Undo float scale: integers become floats.

    Args:
        it: the filter.
        meta: metadata that begins with that of the filter.
        data: its output.
        dtype: type of the values, of floats.
        limit: the maximum of bytes of the result.

    Returns:
        The rest of the metadata, and the data.

    Raises:
        FormatError: the bytes are damaged.
    """
    cursor = Cursor(meta, "float scale metadata")
    _lengths(cursor, data, it.byte_width)
    stored = np.frombuffer(data, f"<i{it.byte_width}")
    _check_total("float scale", len(stored) * dtype.itemsize, None, limit)
    # In doubles whatever the type, as the writer did: float32 would round otherwise.
    with np.errstate(over="ignore", invalid="ignore"):
        found = (it.scale * stored.astype(np.float64) + it.offset).astype(dtype)
    return cursor.rest(), memoryview(found).cast("B")


def _lengths(cursor: Cursor, data: memoryview, width: int) -> list[int]:
    """Read the bytes of each part that the data consists of, which must be whole values."""
    lengths: list[int] = cursor.array("<u4", cursor.u32()).tolist()
    if sum(lengths) != len(data) or any(it % width for it in lengths):
        raise cursor.damaged(f"its parts are no whole values, or do not take {len(data)} bytes")
    return lengths


def _check_total(name: str, size: int, expected: int | None, limit: int) -> None:
    if size > limit or (expected is not None and size != expected):
        raise FormatError(
            f"A tile of a TileDB array is damaged: the windows of {name} make {size} bytes, and "
            f"{limit if expected is None else expected} were expected."
        )


def _before(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the sum of all sizes before each one."""
    return np.cumsum(sizes) - sizes


def _alike(
    kinds: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.intp]]:
    """Return the rows of windows that have the same kind and size, group by group."""
    if not len(sizes):
        return
    # A tile has thousands of windows, nearly all of one size: loop over kinds, not over windows.
    keys = kinds * (int(sizes.max()) + 1) + sizes
    if (keys == keys[0]).all():
        yield np.arange(len(keys))
        return
    order = np.argsort(keys, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def _gather(
    source: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.uint8]:
    """Return pieces of equal size as the rows of a table."""
    count = len(starts)
    first = int(starts[0])
    if int(starts[-1]) - first == (count - 1) * size:  # one after another
        return source[first : first + count * size].reshape(count, size)
    pieces: npt.NDArray[np.uint8] = source[starts[:, None] + np.arange(size)]
    return pieces


def _scatter(
    target: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], table: npt.NDArray[np.uint8]
) -> None:
    """Put the rows of a table at their places."""
    count, size = table.shape
    first = int(starts[0])
    if int(starts[-1]) - first == (count - 1) * size:
        target[first : first + count * size].reshape(count, size)[:] = table
    else:
        target[starts[:, None] + np.arange(size)] = table
