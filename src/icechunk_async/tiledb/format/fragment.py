"""Fragment metadata: the footer, and the blocks that it points to.

A fragment is what one write left, or one consolidation. Its metadata file ends with a footer, whose
lists have an entry for each slot: the attributes, a slot for the coordinates of old versions, the
dimensions, and the times of cells where these are kept.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.schema import check_version, read_range
from icechunk_async.tiledb.format.tiles import decode_generic

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.tiledb.format.schema import Attribute, Dimension, Range, Schema

    type Numbers = npt.NDArray[np.uint64]

__all__ = [
    "Boxes",
    "Footer",
    "FooterHead",
    "Numbers",
    "RTree",
    "TileExtremes",
    "decode_conditions_block",
    "decode_extremes",
    "decode_footer",
    "decode_null_counts",
    "decode_offsets",
    "decode_rtree",
    "decode_sums",
    "dense_tile_box",
    "dense_tile_count",
    "footer_length",
    "read_footer_head",
]

_LENGTH_BYTES: Final = 8
# TileDB's fanout is 10, so 20 levels are enough for 2**64 tiles.
_MAX_LEVELS: Final = 64


@dataclass(frozen=True, slots=True)
class FooterHead:
    """The beginning of a footer, which says by which schema to read it."""

    version: int
    schema_name: str | None
    """The file of the schema; None before version 10, which has only one."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The footer of a fragment's metadata. Lists have an entry for each slot, in bytes."""

    version: int
    schema_name: str | None
    is_dense: bool
    non_empty: tuple[Range, ...] | None
    """The least box that holds all cells, a range for each dimension."""
    sparse_tiles: int
    """The number of tiles of a sparse fragment."""
    last_tile_cells: int
    has_cell_times: bool
    has_deletes: bool
    file_sizes: Numbers
    variable_file_sizes: Numbers
    validity_file_sizes: Numbers
    rtree: int
    """Position of the tree in the file, as the following positions."""
    tile_offsets: Numbers
    variable_offsets: Numbers
    variable_sizes: Numbers
    validity_offsets: Numbers
    mins: Numbers
    maxes: Numbers
    sums: Numbers
    null_counts: Numbers
    statistics: int | None
    """Position of the statistics of the whole fragment."""
    conditions: int | None
    """Position of the list of conditions that were applied to the cells."""
    length: int
    """Bytes of the footer, without its own length at the end."""

    def slots(self) -> int:
        """Return the number of slots."""
        return len(self.file_sizes)

    def cell_times_slot(self) -> int:
        """Return the slot of the times of cells, which `has_cell_times` says there are."""
        return self.slots() - 1 - 2 * self.has_deletes


def _slots(schema: Schema, version: int, *, times: bool, deletes: bool) -> tuple[int, int]:
    """Return the number of slots, and that of the lists about variable length."""
    attributes = len(schema.attributes)
    if version < 5:
        return attributes + 1, attributes
    # The slot for coordinates stays, unused, since coordinates have files of their dimensions.
    number = attributes + 1 + len(schema.dimensions) + times + 2 * deletes
    return number, number


def read_footer_head(footer: bytes | memoryview) -> FooterHead:
    """Read the beginning of a footer.

    Raises:
        FormatError: it is damaged.
        UnsupportedSpecVersionError: its version is not supported.
    """
    cursor = Cursor(footer, "fragment footer")
    version = check_version(cursor.u32(), "fragment")
    return FooterHead(version, cursor.text64() if version >= 10 else None)


def footer_length(version: int, schema: Schema) -> int | None:
    """Return the bytes of a footer of a version before 10; None if it stores its length."""
    dimensions = schema.dimensions
    if version >= 10 or any(it.is_variable for it in dimensions):
        return None
    slots, variable = _slots(schema, version, times=False, deletes=False)
    # The reverse of `decode_footer`, for the versions that do not say where a footer begins.
    lists = 2 * slots + 3 * variable
    if version >= 7:
        lists += 2 * slots
    boxes = sum(2 * it.dtype.itemsize for it in dimensions)
    return 4 + 2 + boxes + 16 + 8 + 8 * lists


def decode_footer(data: bytes | memoryview, schema: Schema, *, is_exact: bool = True) -> Footer:
    """Read a footer.

    Args:
        data: the footer, and its length if that is stored.
        schema: the schema that its head names.
        is_exact: whether nothing else may follow, as it may among consolidated footers.

    Raises:
        FormatError: it is damaged.
        UnsupportedSpecVersionError: its version is not supported.
    """
    cursor = Cursor(data, "fragment footer")
    version = check_version(cursor.u32(), "fragment")
    name = cursor.text64() if version >= 10 else None
    is_dense, is_empty = cursor.flag(), cursor.flag()
    # Where there is no box its bytes are there nevertheless, as zeros.
    boxes = tuple(read_range(cursor, it) for it in schema.dimensions)
    # Of dense fragments these are 0 and the cells of a tile; their tiles follow from the box.
    sparse_tiles, last_cells = cursor.u64(), cursor.u64()
    times = cursor.flag() if version >= 14 else False
    deletes = cursor.flag() if version >= 15 else False
    slots, variable = _slots(schema, version, times=times, deletes=deletes)

    # A list that a version does not have is empty here; `Fragment` asks for the version first.
    def numbers(count: int, since: int = 0) -> Numbers:
        return cursor.array("<u8", count) if version >= since else np.zeros(0, np.uint64)

    found = Footer(
        version=version,
        schema_name=name,
        is_dense=is_dense,
        non_empty=None if is_empty else boxes,
        sparse_tiles=sparse_tiles,
        last_tile_cells=last_cells,
        has_cell_times=times,
        has_deletes=deletes,
        file_sizes=numbers(slots),
        variable_file_sizes=numbers(variable),
        validity_file_sizes=numbers(slots, 7),
        rtree=cursor.u64(),
        tile_offsets=numbers(slots),
        variable_offsets=numbers(variable),
        variable_sizes=numbers(variable),
        validity_offsets=numbers(slots, 7),
        mins=numbers(slots, 11),
        maxes=numbers(slots, 11),
        sums=numbers(slots, 11),
        null_counts=numbers(slots, 11),
        statistics=cursor.u64() if version >= 12 else None,
        conditions=cursor.u64() if version >= 16 else None,
        length=cursor.position,
    )
    if is_exact:
        _check_end(cursor, found)
    _check(cursor, found, schema)
    return found


def _check_end(cursor: Cursor, footer: Footer) -> None:
    """Check that nothing but the length follows."""
    if cursor.remaining == _LENGTH_BYTES and cursor.u64() != footer.length:
        raise cursor.damaged(f"it has {footer.length} bytes, and says otherwise")
    cursor.finish()


def _check(cursor: Cursor, footer: Footer, schema: Schema) -> None:
    if footer.is_dense == schema.is_sparse and footer.is_dense:
        raise cursor.damaged("it is of a dense fragment in a sparse array")
    if footer.is_dense and footer.non_empty is None:
        raise cursor.damaged("a dense fragment has no cells")
    for it, box in zip(schema.dimensions, footer.non_empty or (), strict=False):
        low: Any = box[0]
        high: Any = box[1]
        first: Any = it.low
        last: Any = it.high
        # Written so that a NaN is outside.
        inside = low <= high and (first is None or (first <= low and high <= last))
        if not inside:
            raise cursor.damaged(f"its cells run from {low!r} to {high!r} along {it.name!r}")
    if (
        not footer.is_dense
        and footer.sparse_tiles
        and not (0 < footer.last_tile_cells <= schema.capacity)
    ):
        raise cursor.damaged(f"its last tile has {footer.last_tile_cells} cells")


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of coordinates, both ends included: one entry of each list for each dimension."""

    lows: tuple[npt.NDArray[Any], ...]
    """The lowest coordinate of each box; numbers, or objects of `bytes`."""
    highs: tuple[npt.NDArray[Any], ...]

    def __len__(self) -> int:
        """Return the number of boxes."""
        return len(self.lows[0])

    def take(self, rows: npt.NDArray[Any]) -> Boxes:
        """Return some of the boxes."""
        return Boxes(tuple(it[rows] for it in self.lows), tuple(it[rows] for it in self.highs))


@dataclass(frozen=True, slots=True)
class RTree:
    """Boxes around the tiles of a sparse fragment, in levels; the last has one for each tile."""

    fanout: int
    levels: tuple[Boxes, ...]
    """The root first. Box `i` covers the boxes from `i * fanout` on in the next level."""


def decode_rtree(data: bytes | memoryview, version: int, schema: Schema) -> RTree:
    """Read the tree of a fragment; it has no levels in dense fragments.

    Raises:
        FormatError: it is damaged.
    """
    cursor = Cursor(decode_generic(data, "R-tree", exact=False), "R-tree")
    dimensions = schema.dimensions
    if version < 5 and cursor.u32() != len(dimensions):
        raise cursor.damaged("it has another number of dimensions than the array")
    fanout = cursor.u32()
    if version < 5:
        cursor.u8()
    number = cursor.u32()
    if number > _MAX_LEVELS or (number and fanout < 2):
        raise cursor.damaged(f"it has {number} levels with a fanout of {fanout}")
    levels: list[Boxes] = []
    for _ in range(number):
        count = cursor.u64()
        # Going down the tree multiplies numbers by the fanout, so the levels must fit.
        if levels and not len(levels[-1]) == -(-count // fanout):
            raise cursor.damaged(f"a level of {len(levels[-1])} boxes is above one of {count}")
        levels.append(_boxes(cursor, count, dimensions))
    cursor.finish()
    return RTree(fanout, tuple(levels))


def _boxes(cursor: Cursor, count: int, dimensions: tuple[Dimension, ...]) -> Boxes:
    if not any(it.is_variable for it in dimensions):
        record = np.dtype([(f"d{i}", it.dtype, 2) for i, it in enumerate(dimensions)])
        table = cursor.array(record, count)
        pairs = [table[f"d{i}"] for i in range(len(dimensions))]
        return Boxes(tuple(it[:, 0] for it in pairs), tuple(it[:, 1] for it in pairs))
    cursor.count(count, sum(16 if it.is_variable else 2 for it in dimensions), "boxes")
    columns: list[tuple[list[Any], list[Any]]] = [([], []) for _ in dimensions]
    for _ in range(count):
        for it, (lows, highs) in zip(dimensions, columns, strict=True):
            low, high = read_range(cursor, it)
            lows.append(low)
            highs.append(high)
    return Boxes(
        tuple(_column(it, low) for it, (low, _) in zip(dimensions, columns, strict=True)),
        tuple(_column(it, high) for it, (_, high) in zip(dimensions, columns, strict=True)),
    )


def _column(it: Dimension, values: list[Any]) -> npt.NDArray[Any]:
    found = np.empty(len(values), np.dtype(object) if it.is_variable else it.dtype)
    found[:] = values
    return found


def decode_offsets(data: bytes | memoryview, what: str) -> Numbers:
    """Read a list of numbers: the offsets of tiles in a file, or the plain sizes of tiles.

    Raises:
        FormatError: it is damaged.
    """
    cursor = Cursor(decode_generic(data, what, exact=False), what)
    found = cursor.u64s()
    cursor.finish()
    return found


@dataclass(frozen=True, slots=True)
class TileExtremes:
    """The least or the greatest values of the tiles of an attribute."""

    fixed: bytes
    """The values, or the offset of each in ``variable`` if cells have variable length."""
    variable: bytes

    def numbers(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return numbers of a type, one for each tile."""
        return np.frombuffer(
            self.fixed[: len(self.fixed) // dtype.itemsize * dtype.itemsize], dtype
        )

    def items(self) -> list[bytes] | None:
        """Return values of variable length; None if their offsets make no sense."""
        starts = np.frombuffer(self.fixed[: len(self.fixed) // 8 * 8], "<u8")
        if not len(starts):
            return []
        ends = np.append(starts[1:], np.uint64(len(self.variable)))
        if (ends < starts).any():
            return None  # statistics only save reads: without them the tiles are read
        return [self.variable[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def decode_extremes(data: bytes | memoryview) -> TileExtremes:
    """Read the minima or maxima of tiles.

    Raises:
        FormatError: they are damaged.
    """
    cursor = Cursor(decode_generic(data, "tile extremes", exact=False), "tile extremes")
    fixed, variable = cursor.u64(), cursor.u64()
    found = TileExtremes(bytes(cursor.take(fixed)), bytes(cursor.take(variable)))
    cursor.finish()
    return found


def decode_sums(data: bytes | memoryview, it: Attribute) -> npt.NDArray[Any]:
    """Read the sums of tiles: int64, uint64 or float64 after the type of the attribute.

    Raises:
        FormatError: they are damaged.
    """
    cursor = Cursor(decode_generic(data, "tile sums", exact=False), "tile sums")
    # TileDB adds up what is of any signed type, times included, as int64.
    found = cursor.array({"i": "<i8", "u": "<u8"}.get(it.dtype.kind, "<f8"), cursor.u64())
    cursor.finish()
    return found


def decode_null_counts(data: bytes | memoryview) -> Numbers:
    """Read the numbers of null cells of tiles.

    Raises:
        FormatError: they are damaged.
    """
    return decode_offsets(data, "tile null counts")


def decode_conditions_block(data: bytes | memoryview) -> tuple[str, ...]:
    """Read the names of conditions that were applied to the cells of a fragment.

    Raises:
        FormatError: they are damaged.
    """
    what = "list of processed conditions"
    cursor = Cursor(decode_generic(data, what, exact=False), what)
    number = cursor.count(cursor.u64(), 8, "conditions")
    found = tuple(cursor.text64() for _ in range(number))
    cursor.finish()
    return found


def dense_tile_count(schema: Schema, non_empty: tuple[Range, ...]) -> int:
    """Return the number of tiles of a dense fragment, of which each is stored."""
    return math.prod(stop - start for start, stop in dense_tile_box(schema, non_empty))


def dense_tile_box(schema: Schema, non_empty: tuple[Range, ...]) -> tuple[tuple[int, int], ...]:
    """Return the tiles that a box of cells touches: a half-open range along each dimension."""
    found: list[tuple[int, int]] = []
    for it, box in zip(schema.dimensions, non_empty, strict=True):
        first: Any = it.low
        low: Any = box[0]
        high: Any = box[1]
        extent: Any = it.extent
        # Coordinates 7 to 12 of a domain from 1 on, with tiles of 4: (7 - 1) // 4 = 1 to (12 - 1)
        # // 4 = 2, so [1, 3).
        found.append(((low - first) // extent, (high - first) // extent + 1))
    return tuple(found)
