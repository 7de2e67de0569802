"""Run lengths and dictionaries of strings, which hold the lengths of strings beside their bytes.

A field with one of them has no offsets in its offset file: they are rebuilt here. Numbers are
stored with the higher byte first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.filters.pipeline import FilterCode
from icechunk_async.tiledb.format.types import Datatype

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.tiledb.format.filters.pipeline import Filters

__all__ = ["folds_offsets", "unfold_strings"]

_WIDTHS: Final = (1, 2, 4, 8)
_SINCE: Final = {FilterCode.RLE: 12, FilterCode.DICTIONARY: 13}
_UTF8_SINCE: Final = 17
"""Before, UTF-8 had offsets in their own file even with these filters."""


def folds_offsets(filters: Filters, datatype: Datatype, version: int) -> bool:
    """Return whether the value tiles of a field of variable length hold its offsets.

    Args:
        filters: the pipeline of its values.
        datatype: its type.
        version: format version of the fragment.
    """
    since = _SINCE.get(filters[0].code) if filters else None
    if since is None:
        return False
    if datatype is Datatype.STRING_UTF8:
        return version >= _UTF8_SINCE
    return datatype is Datatype.STRING_ASCII and version >= since


def unfold_strings(
    code: FilterCode, meta: memoryview, data: memoryview, *, cells: int, limit: int
) -> tuple[memoryview, npt.NDArray[np.uint64]]:
    """Return the bytes of all strings, and the offset of each.

    Args:
        code: run lengths or a dictionary.
        meta: metadata of the filter, which was the first.
        data: its output.
        cells: the maximum of strings.
        limit: the maximum of bytes of the result.

    Raises:
        FormatError: the bytes are damaged.
    """
    cursor = Cursor(meta, f"{code.name.lower()} metadata")
    streams = cursor.u32(), cursor.u32()
    plain, stored, offset_bytes = cursor.u32(), cursor.u32(), cursor.u32()
    count = offset_bytes // 8
    # As the first filter it finds no metadata of others: none and one are all there can be.
    if streams != (0, 1) or stored != len(data) or offset_bytes % 8:
        raise cursor.damaged("its sizes do not fit each other")
    if plain > limit or count > cells:
        raise cursor.damaged(f"it claims {count} strings of {plain} bytes")
    first, second = _width(cursor), _width(cursor)
    if code is FilterCode.RLE:
        cursor.finish()
        strings, numbers = _runs(data, first, second, count)
    else:
        dictionary = Cursor(cursor.take(cursor.u32()), "dictionary")
        cursor.finish()
        strings = _dictionary(dictionary, second, count)
        numbers = _numbers(data, first).astype(np.int64)
        if len(numbers) and int(numbers.max()) >= len(strings):
            raise cursor.damaged("a cell has an entry that the dictionary lacks")
    if len(numbers) != count:
        raise cursor.damaged(f"it has {len(numbers)} strings, not {count}")
    lengths = np.array([len(it) for it in strings], np.int64)
    # Checked before the strings are joined: runs and entries repeat, so few bytes may claim many.
    each = lengths[numbers] if count else np.zeros(0, np.int64)
    if int(each.sum()) != plain:
        raise cursor.damaged(f"its strings have {int(each.sum())} bytes, not {plain}")
    offsets = (np.cumsum(each) - each).astype(np.uint64)
    rows: list[int] = numbers.tolist()
    return memoryview(b"".join([strings[it] for it in rows])), offsets


def _width(cursor: Cursor) -> int:
    width = cursor.u8()
    if width not in _WIDTHS:
        raise cursor.damaged(f"it has numbers of {width} bytes")
    return width


def _numbers(data: memoryview, width: int) -> npt.NDArray[np.unsignedinteger]:
    if len(data) % width:
        raise FormatError("A tile of a TileDB array is damaged: the cells of a dictionary are cut.")
    return np.frombuffer(data, f">u{width}")


def _runs(
    data: memoryview, run_width: int, length_width: int, cells: int
) -> tuple[list[bytes], npt.NDArray[np.int64]]:
    """Return the string of each run, and for each cell the number of its run."""
    strings: list[bytes] = []
    counts: list[int] = []
    total = at = 0
    head = run_width + length_width
    while at < len(data):
        run = int.from_bytes(data[at : at + run_width])
        size = int.from_bytes(data[at + run_width : at + head])
        total += run
        at += head + size
        # Runs of no cells would be as many as the bytes allow, each with an object here.
        if at > len(data) or total > cells or not run:
            raise FormatError("A tile of a TileDB array is damaged: its runs are cut or too many.")
        strings.append(bytes(data[at - size : at]))
        counts.append(run)
    return strings, np.repeat(np.arange(len(counts)), counts)


def _dictionary(cursor: Cursor, length_width: int, most: int) -> list[bytes]:
    """Return the entries of a dictionary, of which cells have each."""
    strings: list[bytes] = []
    while cursor.remaining:
        if len(strings) == most:
            raise cursor.damaged(f"it has more entries than there are cells, {most}")
        strings.append(bytes(cursor.take(int.from_bytes(cursor.take(length_width)))))
    return strings
