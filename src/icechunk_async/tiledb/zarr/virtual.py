"""Write dense TileDB arrays into a session: chunks of Zarr refer to tiles where they lie.

A tile can be a chunk if one fragment holds all of its cells that are in the domain. Other tiles are
put together from several fragments, or were written in part; they are copied, if that is allowed.
So are all tiles of cells that differ in length: TileDB keeps their offsets in another file. They
become strings, or `bytes`.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

import anyio.to_thread
import numpy as np
import zarr.api.asynchronous as zarr_async
from zarr.codecs import TransposeCodec
from zarr.errors import ContainsArrayError, ContainsGroupError

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError, NodeExistsError
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.paths import ancestors, check_path
from icechunk_async.tiledb.arrays.cells import category_values
from icechunk_async.tiledb.arrays.dense import overlap
from icechunk_async.tiledb.arrays.folder import storage_location
from icechunk_async.tiledb.arrays.tiles import open_field
from icechunk_async.tiledb.format.types import DATETIMES, Datatype, Layout, is_time, time_unit
from icechunk_async.tiledb.zarr.codec import TileDBCodec, zarr_dtype
from icechunk_async.tiledb.zarr.copies import (
    CellBytes,
    byte_strings,
    element_attributes,
    is_copied,
    is_string,
    strings,
)
from icechunk_async.zarr.virtual.references import column_refs
from icechunk_async.zarr.virtual.zarr2 import group_document

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from zarr import AsyncArray
    from zarr.core.common import JSON

    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.session import Session
    from icechunk_async.tiledb.arrays.array import TileDBArray
    from icechunk_async.tiledb.arrays.dense import Box, DenseGrid
    from icechunk_async.tiledb.arrays.folder import Folder
    from icechunk_async.tiledb.arrays.fragments import Fragment, TilePlaces
    from icechunk_async.tiledb.format.fragment import Numbers
    from icechunk_async.tiledb.format.metadata import MetadataValue
    from icechunk_async.tiledb.format.schema import Attribute, Enumeration, Schema
    from icechunk_async.tiledb.format.tiles import TileForm

    type Tile = tuple[int, ...]

__all__ = ["VirtualTiles", "write_virtual_array"]

_LITERAL: Final = "/!$&'()*+,;=:@~"
"""Characters that are literal in the path of a URL, besides letters, digits and ``-._``."""
_MOST_CELLS: Final = (1 << 63) - 1
_MOST_CHUNKS: Final = 1 << 32
# Coordinates are written as values, of 8 bytes mostly: up to 128 MiB.
_MOST_COORDINATES: Final = 1 << 24
_COORDINATES_A_CHUNK: Final = 1 << 18
_AT_ONCE: Final = 16
_VALIDITY: Final = "_validity"
_FLAGS: Final[Mapping[str, JSON]] = {"flag_values": [0, 1], "flag_meanings": "null valid"}
_BY_NULL: Final = "With validity=True that becomes a separate array. "
_BY_COPY: Final = "With copy=True it is copied to an array of {}. "
_MOST_CATEGORIES: Final = 1000
_WORD: Final = re.compile(r"[A-Za-z0-9_\-.+@]+")
"""A meaning of a flag in CF (section 3.5 of its conventions)."""
_CF_UNITS: Final = {
    "D": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds",
    "us": "microseconds", "ns": "nanoseconds",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VirtualTiles:
    """The result of `write_virtual_array`."""

    referenced: int
    """Chunks that refer to a tile."""
    copied: int
    """Chunks whose cells were copied."""


@dataclass(frozen=True, slots=True)
class _Variable:
    """An attribute that becomes an array of Zarr."""

    attribute: Attribute
    form: TileForm | None
    """How its tiles are encoded; None of cells that are copied as strings or bytes."""
    places: Mapping[int, TilePlaces]
    """Of the fragments with tiles of this form, by number."""
    odd: frozenset[int]
    """Fragments whose tiles have another form, or are copied in any case."""
    is_validity: bool = False
    """Whether the array says which cells are not null, in place of their values."""
    attributes: Mapping[str, JSON] = field(default_factory=dict[str, "JSON"])
    """Attributes of the array."""

    @property
    def name(self) -> str:
        """The name of the array."""
        return _array_name(self.attribute, is_validity=self.is_validity)

    @property
    def datatype(self) -> Datatype:
        """The type of its values."""
        return Datatype.UINT8 if self.is_validity else self.attribute.datatype

    @property
    def values(self) -> int:
        """The number of values of a cell."""
        return 1 if self.is_validity or self.form is None else self.attribute.values

    @property
    def fill(self) -> Any:
        """The value of cells that were never written."""
        it = self.attribute
        if self.form is None:
            return it.fill.decode() if is_string(it) else it.fill
        return it.validity_fill if self.is_validity else np.frombuffer(it.fill, it.dtype)[0]

    def file_of(self, number: int) -> str:
        """Return the name of its file in a fragment."""
        files = self.places[number].files
        found = files.validity if self.is_validity else files.values
        assert found is not None  # attributes that may be null have one
        return found

    def offsets_of(self, number: int) -> Numbers:
        """Return where its tiles are in the file of a fragment."""
        places = self.places[number]
        found = places.validity if self.is_validity else places.values
        assert found is not None
        return found

    def copies(self, plan: _Plan) -> list[Tile]:
        """Return the tiles that cannot be referred to."""
        return plan.mixed + [tile for tile, number in plan.whole if number in self.odd]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The tiles of an array that any fragment holds cells of."""

    whole: list[tuple[Tile, int]]
    """Those whose cells are all in one fragment, with its number."""
    mixed: list[Tile]
    """All others."""


async def write_virtual_array(
    session: Session,
    array: TileDBArray,
    path: str = "/",
    *,
    attributes: Sequence[str] | None = None,
    copy: bool = False,
    validity: bool = False,
    overwrite: bool = False,
    location: str | None = None,
    validate_containers: bool = True,
) -> VirtualTiles:
    """Write a dense TileDB array into a session as a group of arrays, one for each attribute.

    Chunks are the tiles of TileDB, and refer to the bytes of its files, which must stay: do not
    vacuum fragments while a snapshot refers to them. A codec undoes TileDB's filters; Zarr finds it
    wherever this package is installed, also over stores of the official engine.

    Arrays have the shape of the domain, or of the current domain if there is one. Cells that were
    never written have the fill value. Moments are numbers with the units of CF. Coordinates of each
    dimension are written as an array, unless there are more than 16 Mi of them. The key-value
    metadata of TileDB, as far as JSON can hold it, becomes attributes of the group. Numbers of an
    enumeration stay numbers; up to 1000 values are in ``tiledb_enumeration``, and, where they are
    words as CF wants them, in its ``flag_values`` and ``flag_meanings``.

    Cells of variable length are copied as a whole, if ``copy`` is set: text (ASCII or UTF-8) to an
    array of the Zarr type ``string``, all else to one of ``bytes``. So is text of fixed length, to
    ``bytes``. Bytes of numbers are little-endian; the attribute ``element_dtype`` is the NumPy type
    with which ``numpy.frombuffer`` makes numbers of a cell. Cells that were never written hold
    TileDB's fill value there too: by default one NUL character of text, which TileDB-Py shows as
    empty text, and one byte or number of others.

    Args:
        session: a writable session.
        array: the array, opened at the time that is wanted.
        path: of the group.
        attributes: names; all if None.
        copy: copy tiles that cannot be referred to: those that were written in part, or whose cells
            come from several fragments, and those of text and of cells of variable length.
        validity: write attributes that may be null as two arrays: the stored values, and an array
            of 0 for null and 1, whose name ends in ``_validity``; readers have to apply it. Null
            cells of strings and bytes hold the fill value. Otherwise attributes that may be null
            are refused, also with ``copy``: no value is sure to mean null.
        overwrite: replace what is at the path.
        location: URL of the array in references, if it is not that by which it was opened; it may
            begin with ``vcc://`` and the name of a container.
        validate_containers: refuse an array that no container covers.

    Returns:
        The numbers of chunks.

    Raises: before anything was changed, unless a tile could not be copied.
        InvalidInputError: the array is sparse; an attribute may be null and ``validity`` is not
            set; or something would have to be copied and ``copy`` is not set.
        VirtualContainerError: no container covers the array.
        FormatError: a file of the array is damaged, or text is not valid UTF-8. Where that is found
            in a tile that is copied, the rest was written; discard the session.
        NodeExistsError: something is at the path, and ``overwrite`` is not set.
        StorageError: a tile could not be copied, after the rest was written; discard the session.

    Cancellation: a part may have been written to the session.

    Cost: two requests for each fragment, and what reading them costs for tiles that are copied. The
    grid of tiles is walked through in memory, some 200 bytes and 20 microseconds a tile.
    """
    workspace = session.workspace
    workspace.check_writable()
    place = check_path(path)
    location = None if location is None else storage_location(location)
    grid = array.grid()
    chosen = array.attributes(attributes)
    for it in chosen:
        _check_attribute(it, copy=copy, validity=validity)
    _check_names(chosen)
    _check_grid(grid)
    enumerations = await array.enumerations()
    variables: list[_Variable] = []
    for it in chosen:
        about = _attributes_of(it, enumerations.get(it.name))
        variables.append(await _variable(grid, it, about))
        if it.is_nullable:
            variables.append(await _variable(grid, it, _FLAGS, is_validity=True))
    # From here to the group nothing is written: what is refused leaves the session unchanged.
    plan = await anyio.to_thread.run_sync(_plan, grid, variables)
    if not copy:
        _refuse_copies(grid, variables, plan)
    columns = {
        it.name: _columns(
            it,
            grid,
            plan,
            lambda fragment, file: _location(fragment, file, array.folder, location),
            partial(
                column_refs,
                workspace.virtual.locations,
                checksum=None,
                validate_containers=validate_containers,
            ),
        )
        for it in variables
    }
    metadata = _plain_metadata(await array.metadata())
    await _create_group(session, place, metadata, overwrite=overwrite)
    key = place.strip("/")
    await _write_coordinates(session, key, grid, set(columns))
    referenced = copied = 0
    for variable in variables:
        made = await _create(session, key, grid, variable)
        refs, tiles = columns[variable.name], variable.copies(plan)
        workspace.set_refs(check_path(f"{place}/{variable.name}"), refs)
        work = partial(_copy_tile, array, grid, variable, made)
        await bounded_map(work, tiles, limit=_AT_ONCE)
        referenced, copied = referenced + len(refs), copied + len(tiles)
    return VirtualTiles(referenced, copied)


def _check_attribute(it: Attribute, *, copy: bool, validity: bool) -> None:
    """Raise `InvalidInputError` if an attribute cannot be an array of Zarr."""
    why, advice = None, ""
    if it.name and not _is_segment(it.name):
        why = "its name cannot be that of an array"
    elif it.is_nullable and not validity:
        why, advice = "its cells may be null", _BY_NULL
    elif is_copied(it) and not copy:
        why = "its cells have variable length" if it.is_variable else "it is text of fixed length"
        advice = _BY_COPY.format("strings" if is_string(it) else "bytes")
    elif is_string(it) and not _is_valid_text(it.fill):
        why = f"its fill value {it.fill!r:.100} is not valid UTF-8"
    # Zarr has one fill value for all elements of an array.
    elif not is_copied(it) and it.values > 1 and len(set(_fills(it))) > 1:
        why = "its fill value has different parts"
    if why is not None:
        raise InvalidInputError(
            f"The attribute {it.name!r} cannot become an array of Zarr that refers to tiles: "
            f"{why}. {advice}Leave it out with attributes=[...], or read it with `read` of the "
            "array and write its values."
        )


def _is_valid_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _array_name(it: Attribute, *, is_validity: bool) -> str:
    """Return the name of an array of an attribute; TileDB allows one attribute without a name."""
    return f"{it.name or 'values'}{_VALIDITY if is_validity else ''}"


def _check_names(chosen: Sequence[Attribute]) -> None:
    """Raise `InvalidInputError` if an attribute has the name of the array about another's nulls."""
    names = {it.name for it in chosen}
    for it in chosen:
        name = _array_name(it, is_validity=True)
        if it.is_nullable and name in names:
            raise InvalidInputError(
                f"The attribute {it.name!r} may be null, which would be written as {name!r}, and "
                "there is an attribute of this name. Write one of them alone, with "
                "attributes=[...]."
            )


def _attributes_of(it: Attribute, enumeration: Enumeration | None) -> dict[str, JSON]:
    """Return the attributes of the array of an attribute."""
    is_bytes_array = is_copied(it) and not is_string(it)
    found = element_attributes(it) if is_bytes_array else _unit_attributes(it.datatype)
    if it.is_nullable:
        found["ancillary_variables"] = _array_name(it, is_validity=True)
    if enumeration is None:
        return found
    items = category_values(enumeration)
    is_plain = len(items) <= _MOST_CATEGORIES and all(map(_is_json, items))
    found["tiledb_enumeration"] = {
        "name": enumeration.name,
        "is_ordered": enumeration.is_ordered,
        **({"values": cast("JSON", items)} if is_plain else {}),
    }
    # CF separates meanings by spaces, so each has to be a word.
    words = [value for value in items if isinstance(value, str) and _WORD.fullmatch(value)]
    if is_plain and words == items and words:
        found["flag_values"] = list(range(len(items)))
        found["flag_meanings"] = " ".join(words)
    return found


def _fills(it: Attribute) -> list[bytes]:
    size = it.dtype.itemsize
    return [it.fill[at : at + size] for at in range(0, len(it.fill), size)]


def _extent(grid: DenseGrid) -> Box:
    """Return the cells of the arrays of Zarr: those up to the end of the current domain."""
    current = grid.schema.current_domain
    if current is None:
        return grid.domain
    return tuple(
        (0, int(high) - start + 1) for (_, high), start in zip(current, grid.origin, strict=True)
    )


def _check_grid(grid: DenseGrid) -> None:
    for (_, size), extent in zip(_extent(grid), grid.shape, strict=True):
        if size > _MOST_CELLS or -(-size // extent) >= _MOST_CHUNKS:
            raise InvalidInputError(
                f"The TileDB array has {size} cells along a dimension, in tiles of {extent}. An "
                "array of Icechunk has fewer than 2**63 cells and 2**32 chunks along an axis. Copy "
                "the part that holds cells to an array of a smaller domain, with TileDB."
            )


async def _variable(
    grid: DenseGrid, attribute: Attribute, about: Mapping[str, JSON], *, is_validity: bool = False
) -> _Variable:
    """Find the tiles of an attribute; their form is that of the newest fragment that has it."""
    opened = await bounded_map(lambda it: open_field(it, attribute), grid.fragments, limit=_AT_ONCE)
    places = {number: it.places for number, it in enumerate(opened) if it.places is not None}
    if is_copied(attribute) and not is_validity:
        return _Variable(attribute, None, {}, frozenset(places), attributes=about)
    forms = {
        number: _form(it.schema, attribute, it.version, is_validity=is_validity)
        for number, it in enumerate(grid.fragments)
        if number in places
    }
    form = _form(grid.schema, attribute, grid.schema.version, is_validity=is_validity)
    if forms:
        # An array of Zarr has one codec. The newest form, since later writes will have it.
        form = forms[max(forms)]
    odd = frozenset(number for number, it in forms.items() if not _is_alike(it, form))
    for number in odd:
        del places[number]
    return _Variable(attribute, form, places, odd, is_validity, about)


def _form(schema: Schema, attribute: Attribute, version: int, *, is_validity: bool) -> TileForm:
    if is_validity:
        return schema.validity_form(version)
    return schema.value_form(schema.fields[attribute.name], version)


def _is_alike(one: TileForm, other: TileForm) -> bool:
    if (one.filters, one.datatype, one.cell_bytes) != (
        other.filters, other.datatype, other.cell_bytes
    ):  # fmt: skip
        return False
    # The version matters to the filters of moments only.
    return one.version == other.version or not is_time(one.datatype)


def _plan(grid: DenseGrid, variables: Sequence[_Variable]) -> _Plan:
    """Sort the tiles by whether one fragment holds all of their cells."""
    # The tiles of these fragments were counted when their lists were read; so there are not more.
    known = {number for it in variables for number in (*it.places, *it.odd)}
    touched: set[Tile] = set()
    for number in known:
        touched.update(itertools.product(*(range(*it) for it in grid.fragments[number].tile_box)))
    found = _Plan([], [])
    domain = _extent(grid)
    for tile in sorted(touched):
        target = overlap(grid.cells_of(tile), domain)
        sources = grid.sources(tile, domain)
        # One fragment with all cells of the tile. If it had a part only, the rest of what is stored
        # would be zeros, and the cells there belong to older fragments or are fill values.
        if len(sources) == 1 and sources[0].box == target:
            found.whole.append((tile, sources[0].fragment))
        elif sources:
            found.mixed.append(tile)
    return found


def _refuse_copies(grid: DenseGrid, variables: Sequence[_Variable], plan: _Plan) -> None:
    """Raise `InvalidInputError` if there is a tile that must be copied."""
    for it in variables:
        copies = it.copies(plan)
        if copies:
            tile = copies[0]
            names = [
                grid.fragments[at.fragment].name.text for at in grid.sources(tile, _extent(grid))
            ]
            raise InvalidInputError(
                f"{len(copies)} of the tiles of {it.name!r} cannot be referred to: each "
                "was written in part, comes from several fragments, or has other filters than the "
                f"newest. The first one is {tile}, from {', '.join(names[:4])}. Set copy=True to "
                "copy them, or consolidate the array with TileDB first."
            )


def _location(fragment: Fragment, file: str, folder: Folder, location: str | None) -> str:
    """Return the URL of a file of a fragment."""
    key = fragment.folder.key(file)
    if location is not None:
        inside = key.removeprefix(folder.prefix)
        return f"{location.rstrip('/')}/{quote(inside, safe=_LITERAL)}"
    url = folder.url or ""
    if not url.startswith("file://"):  # those of files are quoted already
        scheme, mark, rest = url.partition("://")
        url = f"{scheme}{mark}{quote(rest, safe=_LITERAL)}"
    return f"{url}/{quote(key, safe=_LITERAL)}"


def _columns(
    it: _Variable,
    grid: DenseGrid,
    plan: _Plan,
    locate: Callable[[Fragment, str], str],
    build: Callable[..., ChunkRefs],
) -> ChunkRefs:
    """Return the references of a variable."""
    rows = [(tile, number) for tile, number in plan.whole if number in it.places]
    numbers = sorted({number for _, number in rows})
    codes = {number: code for code, number in enumerate(numbers)}
    urls = [locate(grid.fragments[number], it.file_of(number)) for number in numbers]
    # The values of a cell are a last dimension with one chunk.
    rank = len(grid.shape) + (it.values > 1)
    coords = np.zeros((len(rows), rank), np.uint32)
    offsets, lengths = np.empty(len(rows), np.uint64), np.empty(len(rows), np.uint64)
    for row, (tile, number) in enumerate(rows):
        coords[row, : len(tile)] = tile
        span = it.places[number].range_of(it.offsets_of(number), grid.position(number, tile))
        assert span.stop is not None  # of `range_of`
        offsets[row], lengths[row] = span.start, span.stop - span.start
        # A reference of no bytes would be read as a chunk that is damaged, much later.
        if not lengths[row]:
            raise FormatError(
                f"The tile {tile} of {it.name!r} in the TileDB fragment "
                f"{grid.fragments[number].folder.shown!r} has no bytes. The fragment is damaged."
            )
    kinds = np.array([codes[number] for _, number in rows], np.uint32)
    return build(coords, Strings(tuple(urls)), kinds, offsets=offsets, lengths=lengths)


def _plain_metadata(found: Mapping[str, MetadataValue]) -> dict[str, JSON]:
    """Return the metadata that JSON can hold."""
    plain: dict[str, JSON] = {}
    for name, it in found.items():
        value = it.plain()
        parts = cast("list[object]", value if isinstance(value, list) else [value])
        if _is_text(name) and all(map(_is_json, parts)):
            plain[name] = value
    return plain


def _is_json(value: object) -> bool:
    match value:
        case str():
            return _is_text(value)
        case float():
            return math.isfinite(value)
        case _:
            return isinstance(value, int)


def _names(grid: DenseGrid) -> list[str]:
    """Return the names of dimensions in Zarr."""
    return [
        it.name if _is_segment(it.name) else f"dim_{at}"
        for at, it in enumerate(grid.schema.dimensions)
    ]


def _is_segment(name: str) -> bool:
    """Return whether a name can be that of an array."""
    return name not in ("", ".", "..") and "/" not in name and _is_text(name)


def _is_text(value: str) -> bool:
    """Return whether text can be stored: bytes that were not UTF-8 became surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _unit_attributes(datatype: Datatype) -> dict[str, JSON]:
    """Return the attributes by which CF knows moments and times of day."""
    unit = time_unit(datatype)
    if unit is None:
        return {}
    if unit not in _CF_UNITS:
        return {"tiledb_datatype": datatype.name.lower()}
    if datatype not in DATETIMES:
        return {"units": _CF_UNITS[unit]}
    return {"units": f"{_CF_UNITS[unit]} since 1970-01-01", "calendar": "proleptic_gregorian"}


async def _write_coordinates(
    session: Session, key: str, grid: DenseGrid, taken: Collection[str]
) -> None:
    """Write an array of coordinates for each dimension that is not too long."""
    for name, it, (_, size), low in zip(
        _names(grid), grid.schema.dimensions, _extent(grid), grid.origin, strict=True
    ):
        if name in taken or size > _MOST_COORDINATES:
            continue
        made = await zarr_async.create_array(  # pyright: ignore[reportUnknownMemberType]
            store=session.store,
            name=f"{key}/{name}".strip("/"),
            shape=(size,),
            chunks=(min(size, _COORDINATES_A_CHUNK),),
            dtype=it.dtype,
            dimension_names=[name],
            attributes=_unit_attributes(it.datatype),
        )
        await made.setitem(slice(None), (np.arange(size) + low).astype(it.dtype))


async def _create_group(
    session: Session, place: str, attributes: dict[str, JSON], *, overwrite: bool
) -> None:
    """Create the group, and the groups above it.

    Raises:
        NodeExistsError: something is there, and is not to be replaced.
    """
    try:
        await zarr_async.create_group(  # pyright: ignore[reportUnknownMemberType]
            store=session.store,
            path=place.strip("/"),
            overwrite=overwrite,
            attributes=attributes,
        )
    except (ContainsArrayError, ContainsGroupError) as error:
        raise NodeExistsError(
            f"{place!r} exists. Name another path for the TileDB array, or let it be replaced.",
            path=place,
        ) from error
    for above in ancestors(place):
        session.workspace.set_node(above, group_document({}), None, if_absent=True)


async def _create(session: Session, key: str, grid: DenseGrid, it: _Variable) -> AsyncArray[Any]:
    """Create the array of a variable."""
    shape = tuple(size for _, size in _extent(grid))
    chunks, names = grid.shape, _names(grid)
    if it.values > 1:
        shape, chunks = (*shape, it.values), (*chunks, it.values)
        names.append(f"{it.name}_values")
    if it.form is None:
        # To Zarr a chunk of empty text equals a fill value of NUL, and would not be written.
        config = {"write_empty_chunks": True}
        dtype = "string" if is_string(it.attribute) else CellBytes()
        stored: dict[str, Any] = {"dtype": dtype, "fill_value": it.fill, "config": config}
    else:
        rank = len(grid.shape)
        order = (*range(rank - 1, -1, -1), *range(rank, len(shape)))
        # Bytes of such a tile are the row-major ones of the reversed shape. Only the dimensions are
        # turned: the values of a cell follow one another in both orders.
        is_turned = grid.schema.cell_order is Layout.COL_MAJOR and rank > 1
        number = zarr_dtype(it.datatype)
        stored = {
            "dtype": number,
            "filters": [TransposeCodec(order=order)] if is_turned else (),
            "serializer": TileDBCodec(it.form),
            "compressors": (),
            "fill_value": np.asarray(it.fill).astype(number)[()],
        }
    return await zarr_async.create_array(  # pyright: ignore[reportUnknownMemberType]
        store=session.store,
        name=f"{key}/{it.name}".strip("/"),
        shape=shape,
        chunks=chunks,
        dimension_names=names,
        attributes=dict(it.attributes),
        **stored,
    )


async def _copy_tile(
    array: TileDBArray, grid: DenseGrid, it: _Variable, made: AsyncArray[Any], tile: Tile
) -> None:
    """Read the cells of a tile, and write them as a chunk."""
    box = overlap(grid.cells_of(tile), _extent(grid))
    assert box is not None  # it was planned
    name = it.attribute.name
    cells = (await array.read_cells(box, [name]))[name]
    shape = tuple(high - low for low, high in box)
    if it.values > 1:
        shape = (*shape, it.values)
    flags = cells.valid
    if it.form is None:
        convert = strings if is_string(it.attribute) else byte_strings
        values = await anyio.to_thread.run_sync(convert, cells, it.fill)
    else:
        # The chunk is in Zarr's own form, see `TileDBCodec`: filters are undone here, and not
        # applied again.
        values = flags if it.is_validity and flags is not None else cells.values
    values = values.reshape(shape).astype(made.dtype, copy=False)
    await made.setitem(tuple(slice(*it) for it in box), values)
