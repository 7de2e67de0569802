"""Array schemas: dimensions, attributes, filters, labels, enumerations, the current domain."""

from __future__ import annotations

import math
from dataclasses import field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import UnsupportedSpecVersionError
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.filters.pipeline import Filter, FilterCode, decode_pipeline
from icechunk_async.tiledb.format.tiles import TileForm, decode_generic
from icechunk_async.tiledb.format.types import (
    VAR,
    Datatype,
    Layout,
    datatype_of,
    default_fill,
    layout_of,
    stored_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from icechunk_async.tiledb.format.filters.pipeline import Filters

    type Value = int | float | bytes
    type Range = tuple[Value, Value]

__all__ = [
    "VERSIONS",
    "Attribute",
    "Dimension",
    "DimensionLabel",
    "Enumeration",
    "Range",
    "Schema",
    "Value",
    "check_version",
    "decode_enumeration",
    "decode_schema",
    "read_range",
]

VERSIONS: Final = range(4, 23)
"""Format versions that this library reads."""
_VALIDITY: Final = (Filter(FilterCode.RLE),)
"""Of schemas before version 7, which have none: TileDB's default."""
_MAX_CELL_BYTES: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of an array."""

    name: str
    datatype: Datatype
    values: int
    """Values of a coordinate: 1, or `VAR` for text of any length."""
    filters: Filters
    low: Value | None
    """The first coordinate; None if coordinates are text."""
    high: Value | None
    """The last coordinate."""
    extent: Value | None
    """Length of a tile; None if tiles have no fixed extent."""

    @property
    def is_variable(self) -> bool:
        """Whether coordinates have variable length."""
        return self.values == VAR

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of stored values."""
        return stored_dtype(self.datatype)

    @property
    def is_nullable(self) -> bool:
        """False: coordinates cannot be null."""
        return False

    @property
    def cell_bytes(self) -> int:
        """Bytes of a coordinate, or of a unit of text."""
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of an array."""

    name: str
    datatype: Datatype
    values: int
    """Values of a cell, or `VAR`."""
    filters: Filters
    fill: bytes
    """The stored value of cells that were never written."""
    is_nullable: bool = False
    validity_fill: int = 0
    order: int = 0
    """0, or 1 and 2 for labels that rise and fall."""
    enumeration: str | None = None
    """The name of the enumeration whose values the numbers stand for."""

    @property
    def is_variable(self) -> bool:
        """Whether cells have variable length."""
        return self.values == VAR

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of single stored values."""
        return stored_dtype(self.datatype)

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell, or of a single value if cells have variable length."""
        return self.dtype.itemsize * (1 if self.is_variable else self.values)


@dataclass(frozen=True, slots=True)
class DimensionLabel:
    """Values that label the coordinates of a dimension, kept in an array for themselves."""

    name: str
    dimension: int
    """Index of the dimension."""
    uri: str
    """Location of the array, relative to the array that is labelled if ``is_relative``."""
    is_relative: bool
    attribute: str
    """The attribute of that array which holds the values."""
    order: int
    """0 for none, 1 for rising values, 2 for falling ones."""
    datatype: Datatype
    values: int
    is_external: bool


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of an array, or of some of its fragments."""

    version: int
    is_sparse: bool
    allows_duplicates: bool
    tile_order: Layout
    cell_order: Layout
    capacity: int
    """Cells of a tile of a sparse array."""
    coords_filters: Filters
    offsets_filters: Filters
    validity_filters: Filters
    dimensions: tuple[Dimension, ...]
    attributes: tuple[Attribute, ...]
    labels: tuple[DimensionLabel, ...] = ()
    enumerations: Mapping[str, str] = field(default_factory=dict[str, str])
    """The file of each enumeration by its name."""
    current_domain: tuple[Range, ...] | None = None
    """The part of the domain in use, a range for each dimension; None for all of it."""

    @property
    def fields(self) -> dict[str, Attribute | Dimension]:
        """Attributes and dimensions by name; attributes first, as in files."""
        every: list[Attribute | Dimension] = [*self.attributes, *self.dimensions]
        return {it.name: it for it in every}

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The extents of the dimensions of a dense array."""
        return tuple(int(it.extent or 1) for it in self.dimensions)

    @property
    def tile_cells(self) -> int:
        """The number of cells of a tile of a dense array."""
        return math.prod(self.tile_shape)

    def slot(self, name: str) -> int:
        """Return the index of a field in the lists of a fragment's metadata.

        Attributes come first, then an unused slot for coordinates of old versions, then dimensions.
        """
        for number, it in enumerate(self.attributes):
            if it.name == name:
                return number
        for number, dimension in enumerate(self.dimensions):
            if dimension.name == name:
                return len(self.attributes) + 1 + number
        raise KeyError(name)

    def value_form(self, it: Attribute | Dimension, version: int) -> TileForm:
        """Return how the values of a field are encoded in fragments of a version."""
        filters = it.filters
        if isinstance(it, Dimension) and not filters:
            # Schemas have a list of filters for all coordinates, which dimensions without any take.
            filters = self.coords_filters
        return TileForm(filters, it.datatype, it.cell_bytes, version, it.is_variable)

    def offsets_form(self, version: int) -> TileForm:
        """Return how offsets of values of variable length are encoded."""
        return TileForm(self.offsets_filters, Datatype.UINT64, 8, version)

    def validity_form(self, version: int) -> TileForm:
        """Return how the flags of values that are not null are encoded."""
        return TileForm(self.validity_filters, Datatype.UINT8, 1, version)

    def times_form(self, version: int) -> TileForm:
        """Return how the times of cells are encoded."""
        return TileForm(self.coords_filters, Datatype.UINT64, 8, version)


@dataclass(frozen=True, slots=True)
class Enumeration:
    """The values that the numbers of an attribute stand for."""

    name: str
    datatype: Datatype
    values: int
    is_ordered: bool
    data: bytes
    offsets: tuple[int, ...] | None
    """Where each value begins, if they have variable length."""

    @property
    def numbers_dtype(self) -> np.dtype[Any]:
        """The NumPy type of single stored values."""
        return stored_dtype(self.datatype)

    def items(self) -> list[bytes]:
        """Return the stored bytes of each value."""
        if self.offsets is None:
            size = stored_dtype(self.datatype).itemsize * self.values
            return [self.data[at : at + size] for at in range(0, len(self.data), size)]
        return [self.data[a:b] for a, b in pairwise((*self.offsets, len(self.data)))]


def check_version(version: int, what: str) -> int:
    """Return a format version if it is one that this library reads.

    Raises:
        UnsupportedSpecVersionError: it is older or newer, or experimental.
    """
    if version in VERSIONS:
        return version
    advice = (
        "Read it with an older TileDB, and write it anew with a current one."
        if version < VERSIONS.start
        else "Upgrade icechunk-async to open it."
    )
    raise UnsupportedSpecVersionError(
        f"The {what} of a TileDB array has format version {version}; this library reads versions "
        f"{VERSIONS.start} to {VERSIONS[-1]}. {advice}",
        found=version,
        supported=VERSIONS[-1],
    )


def decode_schema(data: bytes | memoryview) -> Schema:
    """Read a schema file.

    Raises:
        FormatError: it is damaged.
        UnsupportedSpecVersionError: its version is not supported.
        UnsupportedFeatureError: it is encrypted, or has an unknown filter.
    """
    cursor = Cursor(decode_generic(data, "schema"), "schema")
    version = check_version(cursor.u32(), "schema")
    duplicates = cursor.flag() if version >= 5 else False
    is_sparse = cursor.flag()
    tile_order, cell_order = layout_of(cursor.u8()), layout_of(cursor.u8())
    capacity = cursor.u64()
    coords, offsets = decode_pipeline(cursor), decode_pipeline(cursor)
    validity = decode_pipeline(cursor) if version >= 7 else _VALIDITY
    dimensions = _dimensions(cursor, version)
    number = cursor.count(cursor.u32(), 8, "attributes")
    attributes = tuple(_attribute(cursor, version) for _ in range(number))
    labels: tuple[DimensionLabel, ...] = ()
    enumerations: dict[str, str] = {}
    current: tuple[Range, ...] | None = None
    if version >= 18:
        number = cursor.count(cursor.u32(), 30, "labels")
        labels = tuple(_label(cursor) for _ in range(number))
    if version >= 20:
        number = cursor.count(cursor.u32(), 8, "enumerations")
        enumerations = {cursor.text32(): cursor.text32() for _ in range(number)}
    if version >= 22:
        current = _current_domain(cursor, dimensions)
    cursor.finish()
    found = Schema(
        version,
        is_sparse,
        duplicates,
        tile_order,
        cell_order,
        capacity,
        coords,
        offsets,
        validity,
        dimensions,
        attributes,
        labels,
        enumerations,
        current,
    )
    _check(found, cursor)
    return found


def _check(schema: Schema, cursor: Cursor) -> None:
    """Raise `FormatError` if parts of a schema contradict each other."""
    count = len(schema.dimensions) + len(schema.attributes)
    # Names are keys of `fields`: a second field of a name would hide the first one, and its slot.
    if not schema.dimensions or len(schema.fields) != count:
        raise cursor.damaged("it has no dimensions, or two fields of one name")
    if any(it.dimension >= len(schema.dimensions) for it in schema.labels):
        raise cursor.damaged("a label is of a dimension that does not exist")
    if schema.is_sparse:
        if not schema.capacity:
            raise cursor.damaged("its tiles have no cells")
        return
    if schema.cell_order is Layout.HILBERT:
        raise cursor.damaged("a dense array has cells in Hilbert order")
    for it in schema.dimensions:
        # Tiles of a dense array are counted from the beginning of the domain in whole numbers.
        if it.is_variable or it.dtype.kind not in "iu" or it.extent is None or it.values != 1:
            raise cursor.damaged(f"a dense array cannot have the dimension {it.name!r}")


def _dimensions(cursor: Cursor, version: int) -> tuple[Dimension, ...]:
    common = datatype_of(cursor.u8()) if version < 5 else None
    number = cursor.count(cursor.u32(), 5, "dimensions")
    return tuple(_dimension(cursor, version, common) for _ in range(number))


def _dimension(cursor: Cursor, version: int, common: Datatype | None) -> Dimension:
    name = cursor.text32()
    filters: Filters = ()
    values = 1
    if common is None:
        datatype = datatype_of(cursor.u8())
        values = cursor.u32()
        filters = decode_pipeline(cursor)
    else:
        datatype = common
    dtype = stored_dtype(datatype)
    size = 2 * dtype.itemsize if version < 5 else cursor.u64()
    low: Any = None
    high: Any = None
    extent: Any = None
    if size:
        if values != 1 or size != 2 * dtype.itemsize:
            raise cursor.damaged(f"the domain of {name!r} takes {size} bytes")
        low, high = cursor.array(dtype, 2).tolist()
        # So that a NaN is refused, too.
        if not low <= high:
            raise cursor.damaged(f"the domain of {name!r} runs from {low} to {high}")
    if not cursor.flag():
        (extent,) = cursor.array(dtype, 1).tolist()
        if not extent > 0:
            # Extents of signed types are stored as such, and may be as large as an unsigned one.
            extent = _unsigned(extent, dtype)
        if not extent or size == 0:
            raise cursor.damaged(f"the tiles of {name!r} have the extent {extent}")
    if values not in (1, VAR) or (values == 1 and not size):
        raise cursor.damaged(f"the dimension {name!r} has {values} values and no domain")
    return Dimension(name, datatype, values, filters, low, high, extent)


def _unsigned(value: Any, dtype: np.dtype[Any]) -> Any:
    return value % (1 << 8 * dtype.itemsize) if dtype.kind == "i" else 0


def _attribute(cursor: Cursor, version: int) -> Attribute:
    name = cursor.text32()
    datatype = datatype_of(cursor.u8())
    values = cursor.u32()
    filters = decode_pipeline(cursor)
    size = stored_dtype(datatype).itemsize
    if values == 0 or (values != VAR and values * size > _MAX_CELL_BYTES):
        raise cursor.damaged(f"the cells of {name!r} have {values} values")
    if version >= 6:
        fill = cursor.bytes64()
        expected = size if values == VAR else size * values
        if len(fill) % size or (values != VAR and len(fill) != expected):
            raise cursor.damaged(f"the fill value of {name!r} has {len(fill)} bytes")
    elif values != VAR and values * size > cursor.remaining + (1 << 20):
        # The default is made below: a claim in a few bytes must not allocate 2 GiB.
        raise cursor.damaged(f"the cells of {name!r} have {values} values")
    else:
        fill = default_fill(datatype) * (1 if values == VAR else values)
    nullable, validity_fill = (cursor.flag(), cursor.u8()) if version >= 7 else (False, 0)
    order = cursor.u8() if version >= 17 else 0
    enumeration = (cursor.text32() or None) if version >= 20 else None
    return Attribute(
        name, datatype, values, filters, fill, nullable, validity_fill, order, enumeration
    )


def _label(cursor: Cursor) -> DimensionLabel:
    dimension = cursor.u32()
    name = cursor.text32()
    is_relative = cursor.flag()
    uri = cursor.text64()
    attribute = cursor.text32()
    order = cursor.u8()
    datatype = datatype_of(cursor.u8())
    values = cursor.u32()
    return DimensionLabel(
        name, dimension, uri, is_relative, attribute, order, datatype, values, cursor.flag()
    )


def _current_domain(cursor: Cursor, dimensions: tuple[Dimension, ...]) -> tuple[Range, ...] | None:
    version = cursor.u32()
    # TileDB writes 0, and its notes on the format say 1.
    if version > 1:
        raise cursor.damaged(f"its current domain has version {version}")
    if cursor.flag():
        return None
    if cursor.u8() != 0:
        raise cursor.damaged("its current domain has an unknown shape")
    found: list[Range] = []
    for it in dimensions:
        low, high = read_range(cursor, it)
        if not it.is_variable and not _inside(low, high, it):
            raise cursor.damaged(f"the current domain of {it.name!r} leaves its domain")
        found.append((low, high))
    return tuple(found)


def _inside(low: Any, high: Any, it: Dimension) -> bool:
    first, last = it.low, it.high
    return first is not None and last is not None and first <= low <= high <= last


def read_range(cursor: Cursor, it: Dimension) -> Range:
    """Read a range of coordinates, both ends included."""
    if it.is_variable:
        total, first = cursor.u64(), cursor.u64()
        if first > total:
            raise cursor.damaged(f"a range of {it.name!r} takes {total} bytes, its start {first}")
        low = bytes(cursor.take(first))
        return low, bytes(cursor.take(total - first))
    low_value, high_value = cursor.array(it.dtype, 2).tolist()
    return low_value, high_value


def decode_enumeration(data: bytes | memoryview) -> Enumeration:
    """Read the file of an enumeration.

    Raises:
        FormatError: it is damaged.
    """
    cursor = Cursor(decode_generic(data, "enumeration"), "enumeration")
    version = cursor.u32()
    if version > 1:
        raise UnsupportedSpecVersionError(
            f"An enumeration of a TileDB array has version {version}; this library reads version "
            "0. Upgrade icechunk-async to open it.",
            found=version,
            supported=0,
        )
    name = cursor.text32()
    cursor.text32()  # its own file
    datatype = datatype_of(cursor.u8())
    values = cursor.u32()
    is_ordered = cursor.flag()
    stored = cursor.bytes64()
    offsets: tuple[int, ...] | None = None
    size = stored_dtype(datatype).itemsize
    if values == VAR:
        starts = cursor.array("<u8", cursor.u64() // 8)
        if stored and not len(starts):
            raise cursor.damaged("it has values and no offsets of them")
        if len(starts) and (
            starts[0] != 0 or starts[-1] > len(stored) or (starts[1:] < starts[:-1]).any()
        ):
            raise cursor.damaged("the offsets of its values do not rise")
        offsets = tuple(starts.tolist())
    elif not values or len(stored) % (size * values):
        raise cursor.damaged(f"its values take {len(stored)} bytes")
    cursor.finish()
    return Enumeration(name, datatype, values, is_ordered, stored, offsets)
