"""Scan sparse arrays: cells as record batches of Arrow, pruned by coordinates and statistics.

A scan is planned as parts that need nothing of each other. Where an array allows duplicates, or has
one plain fragment, a part is a run of tiles. Elsewhere several fragments may have a cell with the
same coordinates, of which the newest counts: then a part is a box of coordinates, with all tiles
that touch it.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.tiledb.arrays.arrow import arrow_type, to_arrow
from icechunk_async.tiledb.arrays.cells import Cells, fill_cells
from icechunk_async.tiledb.arrays.deleting import kept_cells
from icechunk_async.tiledb.arrays.dense import tiles_at_once
from icechunk_async.tiledb.arrays.pruning import attribute_bounds, known_range, matching_tiles
from icechunk_async.tiledb.arrays.tiles import TimeTiles, open_field, read_coords
from icechunk_async.tiledb.format.schema import Attribute
from icechunk_async.zarr.queries.expressions import as_expression, may_match, needed_columns

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence

    import numpy.typing as npt
    import pyarrow.compute as pc

    from icechunk_async.tiledb.arrays.cells import Field
    from icechunk_async.tiledb.arrays.fragments import Fragment, TilePlaces
    from icechunk_async.tiledb.arrays.pruning import TileBounds
    from icechunk_async.tiledb.arrays.tiles import FieldTiles
    from icechunk_async.tiledb.format.conditions import Condition
    from icechunk_async.tiledb.format.fragment import Boxes
    from icechunk_async.tiledb.format.history import Deletion, Window
    from icechunk_async.tiledb.format.schema import Enumeration, Schema

    type Numbers = npt.NDArray[np.uint64]

__all__ = ["Cut", "Scan", "ScanPart", "SparseReader"]

_TILES_AT_ONCE: Final = 32
_FIELDS_AT_ONCE: Final = 16
_PART_BYTES: Final = 64 << 20
"""Bytes of the columns of a part, roughly."""
# Far more than it takes to divide any number of tiles in halves.
_MOST_CUTS: Final = 60
_TEXT_BYTES: Final = 32
_NEVER: Final = np.uint64((1 << 64) - 1)
"""As the time of deletion: the cell was not deleted."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A bound of the coordinates of a part along one dimension."""

    dimension: int
    value: Any
    """The first coordinate of the upper side."""
    is_lower: bool
    """Whether the part is the lower side."""


@dataclass(frozen=True, slots=True)
class ScanPart:
    """A part of a scan; plain data."""

    tiles: tuple[tuple[int, tuple[int, ...]], ...]
    """The number of each fragment, and its tiles."""
    merges: bool
    """Whether cells of the same coordinates may be among them, of which the newest counts."""
    cuts: tuple[Cut, ...] = ()
    cells: int = 0
    """The number of stored cells."""


@dataclass(slots=True)
class _Pieces:
    """Columns of the tiles of a part, before they are joined."""

    columns: dict[str, list[Cells]] = field(default_factory=dict[str, list[Cells]])
    times: list[Numbers] = field(default_factory=list["Numbers"])
    alive: list[npt.NDArray[np.bool_]] = field(default_factory=list["npt.NDArray[np.bool_]"])
    """Which cells were not deleted before they were consolidated."""
    fragments: list[npt.NDArray[np.int64]] = field(default_factory=list["npt.NDArray[np.int64]"])


class SparseReader:
    """Plans and reads scans of a sparse array, seen in a window of time."""

    def __init__(
        self,
        schema: Schema,
        fragments: Sequence[Fragment],
        window: Window,
        deletions: Sequence[tuple[Deletion, Condition]],
        enumerations: Mapping[str, Enumeration],
    ) -> None:
        """Keep what is seen.

        Args:
            schema: that of the array.
            fragments: the oldest first.
            window: the range of times.
            deletions: delete conditions in it.
            enumerations: by the name of the attribute.

        Raises:
            FormatError: the name of a field is not UTF-8, as Arrow needs it.
        """
        self.schema = schema
        self.fragments = tuple(fragments)
        self.window = window
        self.deletions = tuple(deletions)
        self.enumerations = dict(enumerations)
        for it in _columns(schema):
            _check_name(it.name)
        self.arrow_schema = pa.schema(
            [
                pa.field(
                    it.name,
                    arrow_type(it, self.enumerations.get(it.name)),
                    # Numbers for which an enumeration has no value are null.
                    nullable=it.is_nullable or it.name in self.enumerations,
                )
                for it in _columns(schema)
            ]
        )

    @staticmethod
    def expression(filters: object) -> pc.Expression | None:
        """Return filters as an expression of Arrow; see `as_expression`."""
        return as_expression(filters)

    def scan(
        self, columns: Sequence[str] | None = None, expression: pc.Expression | None = None
    ) -> Scan:
        """Return a scan.

        Args:
            columns: the columns of its batches; dimensions and attributes in their order if None.
            expression: only rows that pass.

        Raises:
            InvalidInputError: a column does not exist, or the expression cannot be applied.
        """
        known = self.arrow_schema.names
        names = known if columns is None else list(dict.fromkeys(columns))
        missing = [it for it in names if it not in known]
        if missing:
            raise InvalidInputError(
                f"The TileDB array has no column {missing[0]!r}. It has "
                f"{', '.join(map(repr, known))}."
            )
        needed = [] if expression is None else needed_columns(expression, self.arrow_schema)
        return Scan(self, tuple(names), expression, tuple(needed))

    def width_of(self, name: str) -> int:
        """Return the bytes of a cell of a field, roughly."""
        it = self.schema.fields[name]
        return _TEXT_BYTES if it.is_variable else it.cell_bytes

    def may_repeat(self) -> bool:
        """Return whether several cells may have the same coordinates, of which one counts."""
        if self.schema.allows_duplicates:
            return False
        # A consolidated fragment with the times of cells keeps older copies of a cell beside the
        # newest.
        return len(self.fragments) > 1 or any(it.footer.has_cell_times for it in self.fragments)

    async def matching(
        self, expression: pc.Expression | None, names: Collection[str]
    ) -> dict[int, npt.NDArray[np.intp]]:
        """Return the tiles of each fragment that may hold rows which pass.

        Args:
            expression: the filter, or None.
            names: the columns that it refers to.
        """
        if expression is None:
            return {
                number: np.arange(it.tile_count)
                for number, it in enumerate(self.fragments)
                if it.tile_count
            }
        dimensions: dict[int, Field] = {
            number: it for number, it in enumerate(self.schema.dimensions) if it.name in names
        }
        attributes = [it for it in self.schema.attributes if it.name in names]

        async def match(number: int) -> npt.NDArray[np.intp]:
            fragment = self.fragments[number]
            if not fragment.tile_count:
                return np.zeros(0, np.intp)
            tree = await fragment.rtree()
            bounds: dict[str, tuple[Field, TileBounds]] = {}
            if self._prunes_attributes(number):
                for it in attributes:
                    found = await attribute_bounds(fragment, it)
                    if found is not None:
                        bounds[it.name] = it, found
            if not dimensions and not bounds:
                return np.arange(fragment.tile_count)
            return matching_tiles(expression, self.arrow_schema, tree, dimensions, bounds)

        # Footers are in memory, trees are not: fragments whose box is elsewhere cost no request.
        near = self._near(expression, dimensions)
        tiles = await bounded_map(match, near, limit=_TILES_AT_ONCE)
        return {number: it for number, it in zip(near, tiles, strict=True) if len(it)}

    def _near(self, expression: pc.Expression, dimensions: Mapping[int, Field]) -> list[int]:
        """Return the fragments whose cells may pass, judged by the box around all of them."""
        known: list[pc.Expression | None] = []
        for it in self.fragments:
            boxes = it.footer.non_empty
            known.append(None if boxes is None or not dimensions else _in_box(boxes, dimensions))
        if not dimensions:
            return list(range(len(self.fragments)))
        kept = may_match(expression, self.arrow_schema, known)
        return [int(it) for it in np.flatnonzero(kept)]

    def _prunes_attributes(self, number: int) -> bool:
        """Return whether tiles of a fragment may be left out by the values of attributes.

        A tile that no row of can pass may hold the newer copy of a cell, which hides an older one
        that would pass. So there must be no older fragment at the place, nor older copies within.
        """
        if not self.may_repeat():
            return True
        fragment = self.fragments[number]
        if fragment.footer.has_cell_times or fragment.footer.non_empty is None:
            return False
        own = fragment.footer.non_empty
        for other in self.fragments:
            box = other.footer.non_empty
            if other is not fragment and box is not None and _touches(own, box):
                return False
        return True

    async def boxes(
        self, chosen: Mapping[int, npt.NDArray[np.intp]]
    ) -> dict[int, tuple[npt.NDArray[np.intp], Boxes]]:
        """Return some tiles of each fragment with their boxes."""
        trees = await bounded_map(
            lambda number: self.fragments[number].rtree(), list(chosen), limit=_TILES_AT_ONCE
        )
        return {
            number: (rows, tree.levels[-1].take(rows))
            for (number, rows), tree in zip(chosen.items(), trees, strict=True)
        }

    async def cells(self, part: ScanPart, names: Sequence[str]) -> tuple[dict[str, Cells], int]:
        """Return the cells of a part that are seen, column by column, and their number.

        They are in no particular order.
        """
        dimensions = [it.name for it in self.schema.dimensions]
        compared = {
            name
            for _, condition in self.deletions
            for name in condition.fields()
            if name in self.schema.fields
        }
        # Then the coordinates are read as well: to find copies, and to leave out the cells of other
        # parts.
        needs_place = part.merges or part.cuts
        read = [*names, *(dimensions if needs_place else ()), *sorted(compared)]
        read = list(dict.fromkeys(read))
        if not read and not self.deletions and self._all_seen(part):
            # Nothing is read that could prove the counts of the metadata, so nothing is made for
            # each of these cells.
            counts = ((self.fragments[number], tiles) for number, tiles in part.tiles)
            return {}, sum(it.cells_of(tile) for it, tiles in counts for tile in tiles)
        pieces = await self._read_tiles(part, read)
        if not pieces.fragments:
            return {name: self._none(name) for name in names}, 0
        columns = {name: Cells.concat(parts) for name, parts in pieces.columns.items()}
        times = np.concatenate(pieces.times)
        fragments = np.concatenate(pieces.fragments)
        # The order of these steps decides what is seen: cells of this part, of each place the
        # newest, those that are not deleted, those that no delete condition hits.
        kept = np.ones(len(times), bool)
        for cut in part.cuts:
            kept &= _on_side(columns[dimensions[cut.dimension]], cut)
        if part.merges:
            rows = np.flatnonzero(kept)
            places = [columns[name].take(rows) for name in dimensions]
            rows = rows[_newest(places, times[rows], fragments[rows])]
            kept = np.zeros(len(times), bool)
            kept[rows] = True
        # Only now: an older cell does not come back because a newer one was deleted.
        kept &= np.concatenate(pieces.alive)
        for deletion, condition in self.deletions:
            kept &= await self._kept(deletion, condition, columns, times, fragments)
        if kept.all():
            return {name: columns[name] for name in names}, len(kept)
        return {name: columns[name].take(kept) for name in names}, int(kept.sum())

    def _all_seen(self, part: ScanPart) -> bool:
        """Return whether no cell of these tiles has a separate time, or one of its deletion."""
        footers = [self.fragments[number].footer for number, _ in part.tiles]
        return not any(it.has_cell_times or it.has_deletes for it in footers)

    def _none(self, name: str) -> Cells:
        it = self.schema.fields[name]
        if isinstance(it, Attribute):
            return fill_cells(it, 0)
        offsets = np.zeros(1, np.int64) if it.is_variable else None
        shape = (0,) if it.is_variable else (0, 1)
        return Cells(it, np.zeros(shape, it.dtype), offsets)

    async def _read_tiles(self, part: ScanPart, names: Sequence[str]) -> _Pieces:
        """Read the tiles of a part, and drop cells that are not seen in the window of time."""
        found = _Pieces({name: [] for name in names})
        work = [(number, tile) for number, tiles in part.tiles for tile in tiles]
        numbers = [number for number, _ in part.tiles]
        every = await bounded_map(
            lambda number: self._open(number, names), numbers, limit=_TILES_AT_ONCE
        )
        opened = dict(zip(numbers, every, strict=True))
        # All of the part is in memory in the end.
        tile_bytes = self.schema.capacity * sum(map(self.width_of, names))
        at_once = tiles_at_once(tile_bytes, _TILES_AT_ONCE)
        results = await bounded_map(lambda it: opened[it[0]].read(it[1]), work, limit=at_once)
        for (number, _), (columns, times, alive) in zip(work, results, strict=True):
            if not len(times):
                continue
            found.alive.append(alive)
            for name, cells in zip(names, columns, strict=True):
                found.columns[name].append(cells)
            found.times.append(times)
            found.fragments.append(np.full(len(times), number))
        return found

    async def _open(self, number: int, names: Sequence[str]) -> _OpenFragment:
        fragment = self.fragments[number]
        fields = [self.schema.fields[name] for name in names]
        # All coordinates of a tile are in one file there, and belong to no single field.
        legacy = fragment.version < 5
        coords = [it for it in fields if not isinstance(it, Attribute)] if legacy else []
        plain = [it for it in fields if it not in coords]
        tiles = await bounded_map(lambda it: open_field(fragment, it), plain, limit=_FIELDS_AT_ONCE)
        return _OpenFragment(
            fragment=fragment,
            window=self.window,
            names=tuple(names),
            fields={it.name: tile for it, tile in zip(plain, tiles, strict=True)},
            coords=await fragment.coords_places() if coords else None,
            times=TimeTiles(fragment, await fragment.times_places())
            if fragment.footer.has_cell_times
            else None,
            deletes=TimeTiles(fragment, await fragment.delete_times_places())
            if fragment.footer.has_deletes
            else None,
        )

    async def _kept(
        self,
        deletion: Deletion,
        condition: Condition,
        columns: Mapping[str, Cells],
        times: Numbers,
        fragments: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Return which cells a delete condition leaves; it does not hold for later cells."""
        # Cells that were written after the deletion stay, also where it would hit them.
        applies = times <= np.uint64(deletion.time)
        numbers: list[int] = np.unique(fragments).tolist()
        for number in numbers:
            # Consolidation may have applied it, and then keeps the time of deletion with each cell.
            if deletion.name in await self.fragments[number].processed():
                applies &= fragments != number
        if not applies.any():
            return ~applies
        return ~applies | kept_cells(condition, columns, len(times))


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan of a sparse array: some columns of the rows that pass a filter."""

    reader: SparseReader
    columns: tuple[str, ...]
    expression: pc.Expression | None
    needed: tuple[str, ...]
    """The columns that the filter refers to."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches."""
        return pa.schema([self.reader.arrow_schema.field(name) for name in self.columns])

    @property
    def read_columns(self) -> list[str]:
        """The columns that are read."""
        return list(dict.fromkeys((*self.columns, *self.needed)))

    async def plan(self, *, part_bytes: int = _PART_BYTES) -> list[ScanPart]:
        """Return the parts of the scan, which leave out tiles that hold no row which passes.

        Args:
            part_bytes: bytes of the columns of a part, roughly.

        Cost: one block of metadata for each fragment, and for statistics up to four for each
        attribute that the filter refers to.
        """
        reader = self.reader
        width = sum(map(reader.width_of, self.read_columns))
        budget = max(1, part_bytes // max(1, width))
        chosen = await reader.matching(self.expression, self.needed)
        if not reader.may_repeat():
            return _runs(reader.fragments, chosen, budget)
        return _boxed(reader.fragments, await reader.boxes(chosen), budget)

    async def read(self, part: ScanPart) -> pa.RecordBatch:
        """Return the rows of one part, in no particular order.

        Raises:
            FormatError: a tile is damaged.

        Cost: a request for each tile and file. Memory: the part.
        """
        names = self.read_columns
        cells, count = await self.reader.cells(part, names)
        if not names:
            return _empty_rows(count)
        enumerations = self.reader.enumerations
        arrays = [to_arrow(cells[name], enumerations.get(name)) for name in names]
        fields = [self.reader.arrow_schema.field(name) for name in names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
        if self.expression is not None and count:
            batch = batch.filter(self.expression)
        return batch.select(list(self.columns))

    async def batches(
        self, parts: Iterable[ScanPart] | None = None
    ) -> AsyncGenerator[pa.RecordBatch]:
        """Iterate over rows, a batch for each part that has any; over all parts if None are given.

        While a batch is used, the next one is not read.
        """
        for part in await self.plan() if parts is None else parts:
            batch = await self.read(part)
            if batch.num_rows:
                yield batch

    async def to_table(self) -> pa.Table:
        """Return all rows. Memory: the rows, and a part."""
        return pa.Table.from_batches([it async for it in self.batches()], self.schema)


@dataclass(frozen=True, slots=True)
class _OpenFragment:
    """A fragment of which the places of the wanted fields are known."""

    fragment: Fragment
    window: Window
    names: tuple[str, ...]
    fields: Mapping[str, FieldTiles]
    coords: TilePlaces | None
    """Where all coordinates are, in versions that keep them in one file."""
    times: TimeTiles | None
    deletes: TimeTiles | None

    async def read(self, tile: int) -> tuple[list[Cells], Numbers, npt.NDArray[np.bool_]]:
        """Return the columns of a tile, the time of each cell, and which were not deleted.

        Cells that were not written in the window of time are left out.
        """
        cells, (times, alive) = await gather(self._cells(tile), self._times(tile))
        columns = [cells[name] for name in self.names]
        if self.times is None:
            return columns, times, alive
        start, end = np.uint64(self.window.start), np.uint64(self.window.end)
        # A consolidated fragment may begin before the window, or end after it.
        seen = (times >= start) & (times <= end)
        if seen.all():
            return columns, times, alive
        return [it.take(seen) for it in columns], times[seen], alive[seen]

    async def _cells(self, tile: int) -> dict[str, Cells]:
        tiles = list(self.fields.values())
        found = await bounded_map(lambda it: it.read(tile), tiles, limit=_FIELDS_AT_ONCE)
        cells = dict(zip(self.fields, found, strict=True))
        if self.coords is not None:
            for it in await read_coords(self.fragment, tile, self.coords):
                cells[it.field.name] = it
        return cells

    async def _times(self, tile: int) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        count = self.fragment.cells_of(tile)
        # One value each, shown at every cell: before the tile is decoded, which happens meanwhile,
        # the count is a claim of the metadata.
        times: Numbers = np.broadcast_to(np.uint64(self.fragment.name.start), count)
        alive: npt.NDArray[np.bool_] = np.broadcast_to(np.bool_(True), count)  # noqa: FBT003 -- NumPy's
        if self.times is not None:
            times = await self.times.read(tile)
        if self.deletes is not None:
            deleted = await self.deletes.read(tile)
            # Seen before the deletion, the cell is still there.
            alive = (deleted == _NEVER) | (deleted > np.uint64(self.window.end))
        return times, alive


def _columns(schema: Schema) -> list[Field]:
    return [*schema.dimensions, *schema.attributes]


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"The name {name!r} of a field of a TileDB array is not UTF-8, which Arrow needs. "
            "Read it with TileDB, and write it anew under another name."
        ) from error


def _touches(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two boxes, both ends included, have a cell in common."""
    return all(a <= d and c <= b for (a, b), (c, d) in zip(one, other, strict=True))


def _in_box(boxes: Sequence[Any], dimensions: Mapping[int, Field]) -> pc.Expression | None:
    """Return the knowledge about rows in a box."""
    found: pc.Expression | None = None
    for number, it in dimensions.items():
        known = known_range(it, *boxes[number])
        if known is not None:
            found = known if found is None else found & known
    return found


def _on_side(cells: Cells, cut: Cut) -> npt.NDArray[np.bool_]:
    """Return which coordinates are on a side of a cut."""
    if cells.offsets is None:
        below: npt.NDArray[np.bool_] = cells.flat() < cut.value
    else:
        # Text coordinates are in the order of their bytes.
        items = cells.stored_items()
        below = np.fromiter((it < cut.value for it in items), bool, len(items))
    return below if cut.is_lower else ~below


def _newest(
    places: Sequence[Cells], times: Numbers, fragments: npt.NDArray[np.int64]
) -> npt.NDArray[np.intp]:
    """Return for each distinct coordinate the row of the newest cell."""
    keys = [_codes(it) for it in places]
    # The last key sorts first: coordinates, then time, then the order of writing.
    order = np.lexsort((fragments, times, *reversed(keys)))
    last = np.zeros(len(order), bool)
    last[-1:] = True
    for key in keys:
        sorted_key = key[order]
        last[:-1] |= sorted_key[1:] != sorted_key[:-1]
    return np.sort(order[last])


def _codes(cells: Cells) -> npt.NDArray[Any]:
    """Return numbers that are equal where the bytes of coordinates are, as TileDB compares them."""
    if cells.offsets is None:
        # By bytes: a coordinate of -0.0 is another place than 0.0.
        return np.ascontiguousarray(cells.flat()).view(f"<u{cells.field.cell_bytes}")
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(it, len(known)) for it in cells.stored_items()], np.int64)


def _empty_rows(count: int) -> pa.RecordBatch:
    """Return rows without columns."""
    # Made without columns a batch has no rows; taking the only one away leaves their number.
    return pa.RecordBatch.from_arrays([pa.nulls(count)], names=[""]).select([])


def _runs(
    fragments: Sequence[Fragment], chosen: Mapping[int, npt.NDArray[np.intp]], budget: int
) -> list[ScanPart]:
    """Return parts that are runs of tiles of a fragment, of up to ``budget`` cells."""
    found: list[ScanPart] = []
    for number, tiles in chosen.items():
        held: list[int] = []
        cells = 0
        for tile in tiles.tolist():
            size = fragments[number].cells_of(tile)
            # A tile is never divided: it is read and decoded as a whole.
            if held and cells + size > budget:
                found.append(ScanPart(((number, tuple(held)),), merges=False, cells=cells))
                held, cells = [], 0
            held.append(tile)
            cells += size
        if held:
            found.append(ScanPart(((number, tuple(held)),), merges=False, cells=cells))
    return found


class _Tiles:
    """Tiles of several fragments, with their boxes, as columns."""

    def __init__(
        self, fragments: Sequence[Fragment], boxes: Mapping[int, tuple[npt.NDArray[Any], Boxes]]
    ) -> None:
        counts = [len(rows) for rows, _ in boxes.values()]
        self.fragment = np.repeat(np.array(list(boxes), np.int64), counts)
        every = [it for _, it in boxes.values()]
        self.tile = np.concatenate([rows for rows, _ in boxes.values()])
        rank = len(every[0].lows)
        self.lows = [np.concatenate([it.lows[d] for it in every]) for d in range(rank)]
        self.highs = [np.concatenate([it.highs[d] for it in every]) for d in range(rank)]
        self.cells = np.array(
            [
                fragments[number].cells_of(tile)
                for number, tile in zip(self.fragment.tolist(), self.tile.tolist(), strict=True)
            ],
            np.int64,
        )


def _boxed(
    fragments: Sequence[Fragment],
    boxes: Mapping[int, tuple[npt.NDArray[np.intp], Boxes]],
    budget: int,
) -> list[ScanPart]:
    """Return parts that are boxes of coordinates, of up to ``budget`` cells where that can be.

    Boxes are cut in two until they are small enough, each time along the dimension at which the
    fewest tiles lie on both sides; such tiles are read for both.
    """
    if not boxes:
        return []
    tiles = _Tiles(fragments, boxes)
    keeps_history = {number for number in boxes if fragments[number].footer.has_cell_times}
    found: list[ScanPart] = []
    waiting: list[tuple[npt.NDArray[np.intp], tuple[Cut, ...]]] = [(np.arange(len(tiles.tile)), ())]
    while waiting:
        rows, cuts = waiting.pop()
        cells = int(tiles.cells[rows].sum())
        cut = None
        if cells > budget and len(rows) > 1 and len(cuts) < _MOST_CUTS:
            cut = _best_cut(tiles, rows)
        if cut is None:
            found.append(_part(tiles, rows, cuts, cells, keeps_history))
            continue
        # Tiles on both sides go to both parts, and each part leaves out the cells of the other one.
        below = tiles.lows[cut.dimension][rows] < cut.value
        above = tiles.highs[cut.dimension][rows] >= cut.value
        waiting.append((rows[above], (*cuts, replace(cut, is_lower=False))))
        waiting.append((rows[below], (*cuts, cut)))
    return found


def _best_cut(tiles: _Tiles, rows: npt.NDArray[np.intp]) -> Cut | None:
    """Return the cut that leaves the fewest tiles on both sides; None if parts stay as large."""
    best: tuple[int, Cut] | None = None
    for dimension, (lows, highs) in enumerate(zip(tiles.lows, tiles.highs, strict=True)):
        # The median of where tiles begin: half of them lie above, whatever the values are.
        value = np.sort(lows[rows])[len(rows) // 2]
        below = int((lows[rows] < value).sum())
        above = int((highs[rows] >= value).sum())
        # All tiles would stay together on one side, and the loop would not end.
        if below == 0 or max(below, above) >= len(rows):
            continue
        # The sum counts tiles on both sides twice, so the least has the fewest of these.
        if best is None or below + above < best[0]:
            plain = value if isinstance(value, bytes) else value.item()
            best = below + above, Cut(dimension, plain, is_lower=True)
    return None if best is None else best[1]


def _part(
    tiles: _Tiles,
    rows: npt.NDArray[np.intp],
    cuts: tuple[Cut, ...],
    cells: int,
    keeps_history: set[int],
) -> ScanPart:
    by_fragment: dict[int, list[int]] = {}
    for number, tile in zip(tiles.fragment[rows].tolist(), tiles.tile[rows].tolist(), strict=True):
        by_fragment.setdefault(number, []).append(tile)
    # A plain fragment has one cell for each place, which TileDB ensures when it is written.
    merges = len(by_fragment) > 1 or bool(keeps_history & by_fragment.keys())
    plain = tuple((number, tuple(sorted(it))) for number, it in sorted(by_fragment.items()))
    return ScanPart(plain, merges, cuts, cells)
