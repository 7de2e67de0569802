"""Read boxes of dense arrays: each cell comes from the newest fragment that holds it.

Cells that no fragment holds have the fill value. A fragment stores whole tiles, also where only a
part of them was written, and what is stored in the rest must not be seen.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, UnsupportedFeatureError
from icechunk_async.tiledb.arrays.cells import Cells, fill_cells
from icechunk_async.tiledb.arrays.tiles import open_field
from icechunk_async.tiledb.format.types import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.tiledb.arrays.fragments import Fragment
    from icechunk_async.tiledb.arrays.tiles import FieldTiles
    from icechunk_async.tiledb.format.schema import Attribute, Schema

    type Box = tuple[tuple[int, int], ...]
    type Tile = tuple[int, ...]
    type Needed = dict[Tile, list[TileSource]]

__all__ = ["Box", "DenseGrid", "TileSource", "read_dense"]

TILES_AT_ONCE: Final = 64
"""Tiles that are read at a time at least."""
_BYTES_AT_ONCE: Final = 16 << 20
_MOST_AT_ONCE: Final = 4096
TILES_A_PART: Final = 4096
"""Tiles that are planned at a time, without a turn of the event loop."""


@dataclass(frozen=True, slots=True)
class TileSource:
    """A fragment that holds cells of a tile."""

    fragment: int
    """Its number."""
    box: Box
    """The cells of the tile that it holds, counted from the beginning of the domain."""


class DenseGrid:
    """The tiles of a dense array, and the fragments that hold their cells. Pure.

    Boxes are half-open ranges along each dimension, counted from the beginning of the domain.
    """

    def __init__(self, schema: Schema, fragments: Sequence[Fragment]) -> None:
        """Index fragments, the oldest first.

        Raises:
            UnsupportedFeatureError: a fragment is sparse, as old versions allowed.
        """
        self.schema = schema
        self.shape = schema.tile_shape
        self.origin = tuple(int(it.low or 0) for it in schema.dimensions)
        for it in fragments:
            # Old versions wrote single cells into a dense array as a sparse fragment.
            if not it.footer.is_dense:
                raise UnsupportedFeatureError(
                    f"The dense TileDB array has the sparse fragment {it.name.text!r}, and such "
                    "fragments are not supported. Consolidate the array with TileDB, or write it "
                    "anew.",
                    feature="sparse fragments in dense arrays",
                )
            if (
                # Evolution adds and drops attributes. Positions of tiles would mean others with
                # other extents.
                it.schema.tile_shape != self.shape
                or tuple(int(d.low or 0) for d in it.schema.dimensions) != self.origin
            ):
                raise FormatError(
                    f"The fragment {it.name.text!r} of a TileDB array was written with other tiles."
                )
        self.fragments = tuple(fragments)
        self.boxes = [self._box_of(it) for it in fragments]
        rank = len(self.shape)
        bounds = np.array(self.boxes, object).reshape(len(fragments), rank, 2)
        # Doubles hold any coordinate, if not exactly; int64 would overflow where a domain of uint64
        # is counted from its beginning.
        self._lows = bounds[:, :, 0].astype(np.float64)
        self._highs = bounds[:, :, 1].astype(np.float64)

    @property
    def domain(self) -> Box:
        """All cells of the domain."""
        return tuple(
            (0, int(it.high or 0) - start + 1)
            for it, start in zip(self.schema.dimensions, self.origin, strict=True)
        )

    def _box_of(self, fragment: Fragment) -> Box:
        assert fragment.footer.non_empty is not None  # by the check of footers
        return tuple(
            (int(low) - start, int(high) - start + 1)
            for (low, high), start in zip(fragment.footer.non_empty, self.origin, strict=True)
        )

    def cells_of(self, tile: Tile) -> Box:
        """Return the cells of a tile, also those beyond the domain."""
        return tuple((n * size, (n + 1) * size) for n, size in zip(tile, self.shape, strict=True))

    def tiles_in(self, box: Box) -> Iterator[Tile]:
        """Iterate over the tiles that a box touches, in row-major order."""
        return itertools.product(*self._spans(box))

    def parts(self, box: Box, most: int) -> Iterator[Box]:
        """Divide a box into parts of whole tiles, without regions that no fragment is near.

        Args:
            box: the cells.
            most: the number of tiles of a part. Tiles may have one cell each, so a large box has
                very many of them.
        """
        if not self.fragments_in(box):
            return
        spans = self._spans(box)
        # By `len` each range would have to fit into 64 bits.
        counts = [it.stop - it.start for it in spans]
        if math.prod(counts) <= most:
            yield box
            return
        # The first axis that can be divided, since tiles along the last ones follow one another in
        # files, and requests for them are joined.
        axis = next(at for at, count in enumerate(counts) if count > 1)
        low, high = box[axis]
        middle = (spans[axis].start + counts[axis] // 2) * self.shape[axis]
        for half in ((low, middle), (middle, high)):
            yield from self.parts((*box[:axis], half, *box[axis + 1 :]), most)

    def _spans(self, box: Box) -> list[range]:
        """Return the numbers of the tiles that a box touches, along each dimension."""
        return [
            range(low // size, -(-high // size))
            for (low, high), size in zip(box, self.shape, strict=True)
        ]

    def sources(self, tile: Tile, wanted: Box) -> list[TileSource]:
        """Return the fragments that hold wanted cells of a tile, the newest first.

        Fragments that are hidden by a newer one which holds all of these cells are left out.
        """
        target = overlap(self.cells_of(tile), wanted)
        found: list[TileSource] = []
        if target is None:
            return found
        # From the newest on, so that the first one with all of the cells ends the search.
        for number in reversed(self.fragments_in(target)):  # some may not touch it after all
            common = overlap(self.boxes[number], target)
            if common is None:
                continue
            found.append(TileSource(number, common))
            if common == target:
                break
        return found

    def fragments_in(self, box: Box) -> list[int]:
        """Return the fragments that may hold cells of a box, the oldest first."""
        lows = np.array([low for low, _ in box], np.float64)
        highs = np.array([high for _, high in box], np.float64)
        # Rounding lets at most too many fragments through.
        near = ((self._lows <= highs) & (self._highs >= lows)).all(axis=1)
        found: list[int] = np.flatnonzero(near).tolist()
        return found

    def position(self, number: int, tile: Tile) -> int:
        """Return the number of a tile in the files of a fragment.

        A fragment stores the tiles of a box in tile order.
        """
        # Tiles [2, 5) by [1, 4) in row-major order: tile (3, 2) is number (3 - 2) * 3 + (2 - 1) =
        # 4. In column-major order the first dimension varies fastest: (2 - 1) * 3 + (3 - 2).
        spans = self.fragments[number].tile_box
        places = [n - low for n, (low, _) in zip(tile, spans, strict=True)]
        sizes = [high - low for low, high in spans]
        if self.schema.tile_order is Layout.COL_MAJOR:
            places, sizes = places[::-1], sizes[::-1]
        found = 0
        for place, size in zip(places, sizes, strict=True):
            found = found * size + place
        return found

    def shaped(self, cells: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the cells of a tile, `(cells, ...)`, in the shape of the tile."""
        rest = cells.shape[1:]
        if self.schema.cell_order is Layout.COL_MAJOR:
            rank = len(self.shape)
            # Column-major cells are the row-major ones of the reversed shape.
            turned = cells.reshape(*self.shape[::-1], *rest)
            return turned.transpose(*range(rank - 1, -1, -1), *range(rank, turned.ndim))
        return cells.reshape(*self.shape, *rest)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes; None if they do not touch."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(low < high for low, high in found) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of a box in an array of the cells of an outer one."""
    return tuple(
        slice(low - start, high - start) for (low, high), (start, _) in zip(box, outer, strict=True)
    )


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the number of cells of a box along each dimension."""
    return tuple(high - low for low, high in box)


def tiles_at_once(tile_bytes: int, least: int = TILES_AT_ONCE) -> int:
    """Return the number of tiles to read at a time: of small ones many, so that requests join."""
    return max(least, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(1, tile_bytes)))


async def read_dense(
    grid: DenseGrid, attributes: Sequence[Attribute], box: Box
) -> dict[str, Cells]:
    """Read the cells of a box, in row-major order.

    Args:
        grid: the array.
        attributes: the attributes to read.
        box: the cells.

    Raises:
        FormatError: a tile is damaged.

    Cost: one request for each tile and file, joined where tiles follow one another. Memory: the
    cells, and `TILES_AT_ONCE` tiles or 16 MiB of them.
    """
    readers = [(_Variable if it.is_variable else _Fixed)(grid, it, box) for it in attributes]
    for number, part in enumerate(grid.parts(box, TILES_A_PART)):
        if number:
            await asyncio.sleep(0)  # others have their turn, also where no tile has to be awaited
        needed = {it: found for it in grid.tiles_in(part) if (found := grid.sources(it, part))}
        await _read_part(readers, needed)
    return {it.attribute.name: it.cells() for it in readers}


async def _read_part(readers: Sequence[_Fixed | _Variable], needed: Needed) -> None:
    # Each has its own tiles in memory, so few at a time.
    await bounded_map(lambda it: it.read(needed), readers, limit=4)


class _Reader:
    """Reads one attribute of a box, some tiles after others."""

    def __init__(self, grid: DenseGrid, attribute: Attribute, box: Box) -> None:
        self.grid = grid
        self.attribute = attribute
        self.box = box
        self._opened: dict[int, FieldTiles] = {}

    async def open(self, needed: Needed) -> None:
        """Open the fragments that hold tiles, each once."""
        numbers = {it.fragment for found in needed.values() for it in found}
        new = sorted(numbers - self._opened.keys())
        opened = await bounded_map(
            lambda number: open_field(self.grid.fragments[number], self.attribute),
            new,
            limit=TILES_AT_ONCE,
        )
        self._opened.update(zip(new, opened, strict=True))

    async def sources(
        self, tile: Tile, sources: Sequence[TileSource]
    ) -> list[tuple[TileSource, Cells]]:
        """Read a tile from the fragments that hold its cells; the newest is last, to win."""
        cells = await bounded_map(
            lambda it: self._opened[it.fragment].read(self.grid.position(it.fragment, tile)),
            sources,
            limit=len(sources),
        )
        return list(zip(sources, cells, strict=True))[::-1]


class _Fixed(_Reader):
    """Cells of fixed length, which are placed where they belong."""

    def __init__(self, grid: DenseGrid, attribute: Attribute, box: Box) -> None:
        super().__init__(grid, attribute, box)
        shape = shape_of(box)
        self._values = np.empty((*shape, attribute.values), attribute.dtype)
        self._valid = np.empty(shape, bool) if attribute.is_nullable else None
        # Cells that tiles overwrite in any case need no fill value first.
        if not any(overlap(it, box) == box for it in grid.boxes):
            fill = fill_cells(attribute, 1)
            self._values[...] = fill.values[0]
            if self._valid is not None and fill.valid is not None:
                self._valid[...] = fill.valid[0]

    async def read(self, needed: Needed) -> None:
        """Read tiles."""
        await self.open(needed)

        async def place(tile: Tile) -> None:
            outer = self.grid.cells_of(tile)
            for source, part in await self.sources(tile, needed[tile]):
                target, inner = within(source.box, self.box), within(source.box, outer)
                self._values[target] = self.grid.shaped(part.values)[inner]
                if self._valid is not None and part.valid is not None:
                    self._valid[target] = self.grid.shaped(part.valid)[inner]

        tile_bytes = self.grid.schema.tile_cells * self.attribute.cell_bytes
        await bounded_map(place, needed, limit=tiles_at_once(tile_bytes))

    def cells(self) -> Cells:
        """Return all cells."""
        count = math.prod(shape_of(self.box))
        valid = None if self._valid is None else self._valid.reshape(count)
        return Cells(
            self.attribute, self._values.reshape(count, self.attribute.values), None, valid
        )


class _Variable(_Reader):
    """Cells of variable length: all parts are collected, then a cell chosen for each place."""

    def __init__(self, grid: DenseGrid, attribute: Attribute, box: Box) -> None:
        super().__init__(grid, attribute, box)
        # The number of a cell among all parts; 0 is the fill value.
        self._chosen = np.zeros(shape_of(box), np.int64)
        self._parts = [fill_cells(attribute, 1)]
        self._count = 1

    async def read(self, needed: Needed) -> None:
        """Read tiles."""
        await self.open(needed)
        found = await bounded_map(
            lambda tile: self.sources(tile, needed[tile]), needed, limit=TILES_AT_ONCE
        )
        parts: list[Cells] = []
        for tile, sources in zip(needed, found, strict=True):
            outer = self.grid.cells_of(tile)
            for source, part in sources:
                inner, target = within(source.box, outer), within(source.box, self.box)
                numbers = self.grid.shaped(np.arange(len(part)))[inner]
                # Only the cells that the fragment holds are kept, not those that pad its tile.
                flat = numbers.reshape(-1)
                parts.append(part.take(flat))
                places = self._count + np.arange(len(flat))
                self._chosen[target] = places.reshape(numbers.shape)
                self._count += len(flat)
        if parts:
            self._parts.append(Cells.concat(parts))

    def cells(self) -> Cells:
        """Return all cells."""
        return Cells.concat(self._parts).take(self._chosen.reshape(-1))
