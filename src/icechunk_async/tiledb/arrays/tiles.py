"""Read tiles of a fragment as cells: fetch their bytes, undo their filters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import FormatError, ObjectNotFoundError, UnsupportedFeatureError
from icechunk_async.tiledb.arrays.cells import Cells, fill_cells
from icechunk_async.tiledb.format.schema import Attribute, Dimension
from icechunk_async.tiledb.format.tiles import TileForm

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from icechunk_async.storage import ByteRange
    from icechunk_async.tiledb.arrays.cells import Field
    from icechunk_async.tiledb.arrays.fragments import Fragment, TilePlaces
    from icechunk_async.tiledb.format.schema import Schema

    type Bytes = bytes | memoryview

__all__ = ["FieldTiles", "TimeTiles", "decode_tile", "open_field", "read_coords"]

_ON_A_THREAD_BYTES: Final = 128 << 10
"""Tiles from this size on are decoded on a worker thread."""


class FieldTiles:
    """The tiles of one field in one fragment; made by `open_field`."""

    def __init__(self, fragment: Fragment, field: Field, places: TilePlaces | None) -> None:
        """Keep where the tiles are; None if the fragment does not have the field."""
        self._fragment = fragment
        self._field = field
        self.places = places

    async def read(self, tile: int) -> Cells:
        """Return the cells of a tile.

        Raises:
            FormatError: it is damaged.

        Cost: up to three requests at a time, one for each file of the field.
        """
        fragment, places = self._fragment, self.places
        count = fragment.cells_of(tile)
        if places is None:
            assert isinstance(self._field, Attribute)  # a dimension exists in every schema
            return fill_cells(self._field, count)
        wanted: list[tuple[str, ByteRange]] = [
            (places.files.values, places.range_of(places.values, tile))
        ]
        plain = count * self._field.cell_bytes
        if places.files.variable is not None:
            assert places.variable is not None  # see `Fragment.places`
            assert places.variable_sizes is not None
            wanted.append((places.files.variable, places.range_of(places.variable, tile)))
            # A claim of the metadata, which bounds what is decoded; see `_chunks`.
            plain = int(places.variable_sizes[tile])
        if places.files.validity is not None:
            assert places.validity is not None
            wanted.append((places.files.validity, places.range_of(places.validity, tile)))
        parts = await read_parts(fragment, wanted)
        schema, version = fragment.schema, fragment.version
        work = partial(decode_tile, schema, self._field, version, parts, cells=count, plain=plain)
        try:
            return await on_a_thread(work, plain)
        except FormatError as error:
            error.add_note(
                f"It was tile {tile} of {self._field.name!r} in the fragment "
                f"{fragment.folder.shown!r}."
            )
            raise


async def open_field(fragment: Fragment, field: Field) -> FieldTiles:
    """Return the tiles of a field in a fragment.

    Raises:
        UnsupportedFeatureError: the fragment was written when the field had another type.
        FormatError: the fragment's metadata is damaged.
    """
    # The schema of the fragment decides how its tiles are encoded, also which filters they went
    # through.
    own = fragment.schema.fields.get(field.name)
    if own is None:
        return FieldTiles(fragment, field, None)
    same = (own.datatype, own.values, own.is_nullable) == (
        field.datatype,
        field.values,
        field.is_nullable,
    )
    if not same or isinstance(own, Dimension) != isinstance(field, Dimension):
        raise UnsupportedFeatureError(
            f"The field {field.name!r} of a TileDB array had another type when the fragment "
            f"{fragment.name.text!r} was written, and fields that changed their type are not "
            "supported. Read the array at an earlier time, or leave the field out.",
            feature="fields that changed their type",
        )
    return FieldTiles(fragment, own, await fragment.places(field.name))


async def read_coords(fragment: Fragment, tile: int, places: TilePlaces) -> list[Cells]:
    """Return the coordinates of a tile of a version before 5, which keeps all in one file."""
    dimensions = fragment.schema.dimensions
    count = fragment.cells_of(tile)
    first = dimensions[0]
    width = first.dtype.itemsize
    wanted = [(places.files.values, places.range_of(places.values, tile))]
    (data,) = await read_parts(fragment, wanted)
    form = TileForm(
        fragment.schema.coords_filters, first.datatype, width * len(dimensions), fragment.version
    )
    plain = count * width * len(dimensions)
    found = await on_a_thread(partial(form.decode, data, plain), plain)
    # One dimension after another, each for all cells of the tile.
    table = found.view(first.dtype).reshape(len(dimensions), count)
    return [Cells(it, table[row][:, None]) for row, it in enumerate(dimensions)]


class TimeTiles:
    """The times of cells, or of their deletion, in one fragment."""

    def __init__(self, fragment: Fragment, places: TilePlaces) -> None:
        """Keep where the tiles are."""
        self._fragment = fragment
        self._places = places

    async def read(self, tile: int) -> npt.NDArray[np.uint64]:
        """Return a number for each cell of a tile."""
        fragment, places = self._fragment, self._places
        plain = 8 * fragment.cells_of(tile)
        wanted = [(places.files.values, places.range_of(places.values, tile))]
        (data,) = await read_parts(fragment, wanted)
        form = fragment.schema.times_form(fragment.version)
        return (await on_a_thread(partial(form.decode, data, plain), plain)).view("<u8")


async def read_parts(fragment: Fragment, wanted: list[tuple[str, ByteRange]]) -> list[Bytes]:
    """Read parts of files of a fragment, at the same time."""

    async def read(place: tuple[str, ByteRange]) -> Bytes:
        path, span = place
        try:
            data = (await fragment.folder.get(path, span)).data
        except ObjectNotFoundError as error:
            raise FormatError(
                f"The TileDB fragment at {fragment.folder.shown!r} has lost its file {path!r}. "
                "If it was vacuumed while it was read, open the array again."
            ) from error
        # Storages return what is there of a range beyond the end.
        if span.stop is not None and len(data) != span.stop - span.start:
            raise FormatError(
                f"{path!r} of the TileDB fragment at {fragment.folder.shown!r} is cut off: bytes "
                f"{span.start} to {span.stop} should be there."
            )
        return data

    return await bounded_map(read, wanted, limit=3)


async def on_a_thread[T](work: Callable[[], T], size_bytes: int) -> T:
    """Return the result of some decoding, done on a worker thread if it takes long."""
    if size_bytes < _ON_A_THREAD_BYTES:
        return work()
    return await anyio.to_thread.run_sync(work)


def decode_tile(
    schema: Schema,
    field: Field,
    version: int,
    parts: list[Bytes],
    *,
    cells: int,
    plain: int,
) -> Cells:
    """Undo the filters of a tile; pure.

    Args:
        schema: that of the fragment.
        field: the field, in that schema.
        version: of the fragment.
        parts: the stored tile of values or offsets, then those of values of variable length and of
            validity, as far as the field has them.
        cells: the number of cells.
        plain: plain bytes of the values.

    Raises:
        FormatError: the tile is damaged.
    """
    form = schema.value_form(field, version)
    left = list(parts)
    offsets: npt.NDArray[np.int64] | None = None
    if field.is_variable:
        stored_offsets, stored = left.pop(0), left.pop(0)
        values, starts = _variable(schema, form, stored_offsets, stored, cells=cells, plain=plain)
        offsets = _bounds(starts, plain, field)
        found: npt.NDArray[Any] = values.view(field.dtype)
    else:
        values = form.decode(left.pop(0), plain)
        found = values.view(field.dtype).reshape(cells, -1)
    valid = None
    if field.is_nullable:
        valid = schema.validity_form(version).decode(left.pop(0), cells) != 0
    return Cells(field, found, offsets, valid)


def _variable(
    schema: Schema, form: TileForm, offsets: Bytes, values: Bytes, *, cells: int, plain: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
    if form.folds_offsets:
        return form.decode_strings(values, plain, cells)
    starts = schema.offsets_form(form.version).decode(offsets, 8 * cells).view("<u8")
    return form.decode(values, plain), starts


def _bounds(starts: npt.NDArray[np.uint64], plain: int, field: Field) -> npt.NDArray[np.int64]:
    """Return where cells begin, and the end, in values; given in bytes."""
    bounds = np.append(starts, np.uint64(plain))
    width = np.uint64(field.dtype.itemsize)
    # They become slices of the values, and NumPy would cut any of them without an error.
    if bounds[0] != 0 or (bounds[1:] < bounds[:-1]).any() or (bounds % width).any():
        raise FormatError(
            f"A tile of {field.name!r} of a TileDB array is damaged: the offsets of its cells do "
            "not rise from 0 to its end."
        )
    return (bounds // width).astype(np.int64)
