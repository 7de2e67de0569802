"""A group of arrays as a table: its dataset, columns and types, and cells as Arrow batches."""

from __future__ import annotations

import struct
import warnings
from collections import Counter
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, cast

import numpy as np
import pyarrow as pa
import xarray
import zarr
from xarray.backends import BackendArray
from xarray.backends.zarr import FillValueCoder
from xarray.coders import CFDatetimeCoder
from xarray.core import indexing

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.arrow.coordinates import keep_coordinates
from icechunk_async.errors import InvalidInputError, NodeNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.sync import Session

    type Places = npt.NDArray[np.int64]

__all__ = [
    "ARROW_TYPES",
    "SQL_TYPES",
    "Cells",
    "Column",
    "GroupSource",
    "TableShape",
    "arrays_of",
    "arrow_type",
    "check_type",
    "dimension_values",
    "open_group",
    "path_of",
    "stored_attributes",
    "table_kinds",
    "table_shape",
    "times_decoder",
    "to_arrow",
    "unique_dims",
    "values_of",
]


class GroupSource(Protocol):
    """A group of one snapshot, and how its values are shown."""

    @property
    def group(self) -> str:
        """Path of the group without slashes at its ends; empty for the root."""
        ...

    @property
    def snapshot_id(self) -> str | None:
        """The snapshot, once it is known."""
        ...

    @property
    def decode(self) -> bool:
        """Whether CF times, scales, offsets and fill values are decoded as xarray does."""
        ...

    @property
    def nan_as_null(self) -> bool:
        """Whether NaN becomes null."""
        ...

    @property
    def batch_rows(self) -> int:
        """The most rows of a batch."""
        ...

    def session(self) -> Session:
        """Return the session of the snapshot."""
        ...


def path_of(source: GroupSource, name: str) -> str:
    """Return the path of an array of the group."""
    return f"/{source.group}/{name}" if source.group else f"/{name}"


def arrays_of(source: GroupSource) -> dict[str, Any]:
    """Return the Zarr arrays of a group, by name and in the order of names.

    Raises:
        NodeNotFoundError: there is no such group.
    """
    opening = cast("Any", zarr.open_group)  # pyright: ignore[reportUnknownMemberType]
    try:
        group = opening(source.session().store, path=source.group, mode="r", zarr_format=3)
    except FileNotFoundError:
        raise NodeNotFoundError(
            f"There is no group {source.group or '/'!r} in snapshot {source.snapshot_id}. Name "
            "one with 'group'.",
            path=source.group,
        ) from None
    # Zarr hands them over as their documents arrive. Names of dimensions depend on the order
    # (`unique_dims`), and must be the same in each process that reads a part of one table.
    return dict(sorted(group.arrays()))


def open_group(source: GroupSource) -> xarray.Dataset:
    """Open the arrays of a group as a lazy dataset, whose dimensions are as `unique_dims` says.

    Raises:
        NodeNotFoundError: there is no such group.

    Memory: up to 16 MiB for each coordinate, once it has been read.
    """
    arrays = arrays_of(source)
    named = {name: _dimension_names(array) for name, array in arrays.items()}
    dims = unique_dims(named, {name: array.shape for name, array in arrays.items()})
    if dims != named:
        opened = _renamed(arrays, dims, named, decode=source.decode)
    else:
        opened = _as_named(source)
    return keep_coordinates(_with_exact_integers(opened, arrays))


def _as_named(source: GroupSource) -> xarray.Dataset:
    """Open a group whose dimensions have names that can be those of columns."""
    store: Any = source.session().store
    opening = cast("Any", xarray.open_dataset)  # pyright: ignore[reportUnknownMemberType]
    with warnings.catch_warnings():
        # A FutureWarning on times without a calendar, which no user of Spark can act on.
        warnings.simplefilter("ignore")
        try:
            dataset: xarray.Dataset = opening(
                store,
                engine="zarr",
                group=source.group or None,
                # A store of a session has all metadata in memory, and no consolidated document.
                consolidated=False,
                zarr_format=3,
                chunks=None,
                mask_and_scale=source.decode,
                decode_times=times_decoder(decode=source.decode),
                # An index reads the whole coordinate; a table may need a part of it, or none.
                create_default_indexes=False,
            )
        # Older versions of xarray assert that attributes have the type that it writes.
        except (AssertionError, ValueError, TypeError, struct.error) as error:
            raise _undecodable(error) from error
    return dataset


def _with_exact_integers(
    dataset: xarray.Dataset, arrays: Mapping[str, zarr.Array[Any]]
) -> xarray.Dataset:
    """Put back stored integers of 64 bits that xarray made doubles of, for those missing.

    Doubles round them beyond 2^53, and tables have null. `values_of` masks what is missing.
    """
    exact: dict[str, xarray.Variable] = {}
    for name, array in arrays.items():
        variable = dataset.variables.get(name)
        marks = None if variable is None else _marks_of(array, variable)
        if variable is not None and marks is not None:
            dims = tuple(map(str, variable.dims))
            exact[name] = _lazy(array, dims)
            exact[name].attrs = variable.attrs
            exact[name].encoding = {**variable.encoding, _MARKS: marks}
    coords = {name: it for name, it in exact.items() if name in dataset.coords}
    dataset.coords.update(xarray.Coordinates(coords, indexes={}))
    return dataset.assign({name: it for name, it in exact.items() if name not in coords})


def _marks_of(array: zarr.Array[Any], variable: xarray.Variable) -> npt.NDArray[Any] | None:
    """Return the integers that mark missing ones, if nothing else makes values of them doubles."""
    decoded: np.dtype[Any] = cast("Any", variable).dtype
    is_wide = array.dtype.kind in "iu" and array.dtype.itemsize == _WIDE_BYTES
    if not is_wide or decoded != np.float64 or not _OTHERWISE.isdisjoint(variable.encoding):
        return None
    attributes: dict[str, Any] = dict(array.attrs)
    given: list[Any] = []
    for name in _MISSING:
        it: Any = attributes.get(name, [])
        given += it if isinstance(it, list) else [it]
    limits = np.iinfo(array.dtype)
    # A mark that is no integer of the type marks nothing exactly: xarray's doubles stay.
    if not all(type(it) is int and limits.min <= it <= limits.max for it in given):
        return None
    return np.array(given, array.dtype.newbyteorder("="))


def _dimension_names(array: zarr.Array[Any]) -> tuple[str | None, ...]:
    return getattr(array.metadata, "dimension_names", None) or (None,) * array.ndim


def unique_dims(
    named: Mapping[str, tuple[str | None, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return names of the dimensions of arrays, each once in an array, and of one length. Pure.

    A dimension without a name is `dim_0` and so on, by its axis. One that an array has again is
    `x_2`, after its first, `x`. One whose name is that of an array which is not its coordinate is
    `x_index`. Where arrays differ in the length of a dimension, each gets a separate one.
    """
    # Also names that nothing needs yet: a new name must not become that of an array.
    taken = {*named, *(it for names in named.values() for it in names if it)}
    lengths: dict[str, int] = {}
    found: dict[str, tuple[str, ...]] = {}
    for name, names in named.items():
        dims: list[str] = []
        times: Counter[str] = Counter()
        for axis, (given, length) in enumerate(zip(names, shapes[name], strict=True)):
            dim = given or f"dim_{axis}"
            if given and named.get(given, (given,)) != (given,):
                dim = _free(f"{dim}_index", taken)
            times[dim] += 1
            if times[dim] > 1:
                dim = _free(f"{dim}_{times[dim]}", taken)
            # The first array keeps the name, in the order that is given.
            if lengths.setdefault(dim, length) != length:
                dim = f"{name}_{dim}"
                lengths[dim] = length
            dims.append(dim)
        found[name] = tuple(dims)
    return found


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _renamed(
    arrays: Mapping[str, zarr.Array[Any]],
    dims: Mapping[str, tuple[str, ...]],
    named: Mapping[str, tuple[str | None, ...]],
    *,
    decode: bool,
) -> xarray.Dataset:
    """Open arrays with other names of dimensions; one that an array has again has coordinates."""
    variables = {name: _lazy(array, dims[name]) for name, array in arrays.items()}
    for name, array in arrays.items():
        for given, dim, length in zip(named[name], dims[name], array.shape, strict=True):
            if given and dim != given and dims.get(given) == (given,):
                coordinate = arrays[given]
                if coordinate.shape == (length,):
                    variables[dim] = _lazy(coordinate, (dim,))
    coords = {name: it for name, it in variables.items() if it.dims == (name,)}
    dataset = xarray.Dataset({name: it for name, it in variables.items() if name not in coords})
    dataset.coords.update(xarray.Coordinates(coords, indexes={}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            decoded = xarray.decode_cf(
                dataset, mask_and_scale=decode, decode_times=times_decoder(decode=decode)
            )
        except (ValueError, TypeError) as error:
            raise _undecodable(error) from error
    return decoded


def _undecodable(error: Exception) -> InvalidInputError:
    """Return the error for an array whose attributes are not what CF says."""
    reason = str(error).partition(". Try opening")[0] or "an attribute has another type"
    # Older versions of xarray name the variable before the reason.
    _, found, times = reason.partition("unable to decode time")
    if not found:
        return InvalidInputError(
            f"The arrays cannot be decoded: {reason.partition(chr(10))[0]}. Correct the attribute "
            "'_FillValue', 'missing_value', 'scale_factor' or 'add_offset', or read the stored "
            "numbers: set 'decode' to false."
        )
    reason = found + times
    return InvalidInputError(
        f"The arrays cannot be shown as times: {reason}. Read the stored numbers: set "
        "'decode' to false."
    )


def times_decoder(*, decode: bool) -> CFDatetimeCoder | bool:
    """Return how to decode times: in microseconds, as Spark has them, for any year of SQL."""
    return CFDatetimeCoder(time_unit="us") if decode else False


def _lazy(array: zarr.Array[Any], dims: tuple[str, ...]) -> xarray.Variable:
    lazy = indexing.LazilyIndexedArray(_Stored(array))
    variable = xarray.Variable(dims, lazy, stored_attributes(array))
    variable.encoding = {
        "preferred_chunks": {},
        "chunks": array.chunks,
        "shards": array.shards,
    }
    return variable


def stored_attributes(array: zarr.Array[Any] | zarr.AsyncArray[Any]) -> dict[str, Any]:
    """Return the attributes of an array as xarray decodes values by them."""
    attributes: dict[str, Any] = dict(array.attrs)
    fill = attributes.get("_FillValue")
    if isinstance(fill, str) and array.dtype.kind == "f":  # the bytes of a float, for xarray
        coder = cast("Any", FillValueCoder)
        attributes["_FillValue"] = coder.decode(fill, array.dtype)
    return attributes


class _Stored(BackendArray):
    """A Zarr array that xarray reads lazily."""

    def __init__(self, array: zarr.Array[Any]) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    def _read(self, key: tuple[Any, ...]) -> Any:
        return self.array[key]


SQL_TYPES: Final[Mapping[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.int16(),
    "uint16": pa.int32(),
    "uint32": pa.int64(),
    "uint64": pa.decimal128(20, 0),
    "float16": pa.float32(),
    "float32": pa.float32(),
    "float64": pa.float64(),
}
"""Without unsigned integers and half floats: each becomes the next larger type, as in Spark."""
ARROW_TYPES: Final[Mapping[str, pa.DataType]] = {
    **SQL_TYPES,
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
}
"""Without half floats, which most engines cannot compare."""
_MIXED: Final = frozenset({"standard", "gregorian"})
"""Names of the calendar of CF that is Julian until 1582."""
_MARKS: Final = "marks of missing integers"
"""In the encoding of a variable whose values xarray would have made doubles."""
_MISSING: Final = ("_FillValue", "missing_value")
_OTHERWISE: Final = frozenset({"scale_factor", "add_offset", "_Unsigned", "units"})
"""Attributes by which integers become others, or times."""
_WIDE_BYTES: Final = 8
_WIDER: Final = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: a variable of the dataset, or an index along a dimension."""

    name: str
    type: pa.DataType
    dims: tuple[str, ...]
    variable: bool = True
    """False for the index along a dimension without coordinates."""
    marked: bool = False
    """Whether it has integers of 64 bits of which some are missing."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """The dimensions of a table, whose rows are cells, and all of its columns."""

    dims: tuple[str, ...]
    columns: tuple[Column, ...]

    def column(self, name: str) -> Column:
        """Return a column by name.

        Raises:
            InvalidInputError: there is no such column.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise InvalidInputError(
            f"There is no column {name!r}. The table has "
            f"{', '.join(it.name for it in self.columns)}; other arrays are named by "
            "'arrays'."
        )


def table_shape(
    dataset: xarray.Dataset,
    arrays: tuple[str, ...] | None,
    wanted: Iterable[str] = (),
    *,
    types: Mapping[str, pa.DataType] = SQL_TYPES,
) -> TableShape:
    """Find the arrays that make up a table.

    Args:
        dataset: the group.
        arrays: arrays named by the caller; None for those with the most dimensions and all
            auxiliary coordinates.
        wanted: columns named by the caller's schema, which select arrays if `arrays` does not.
        types: column types of numbers: `SQL_TYPES` or `ARROW_TYPES`.

    Raises:
        InvalidInputError: there is no such array, arrays do not share their dimensions, or one
            has a type without a column type.
    """
    # In the order of names, not in that of the dataset, which is as documents arrived: rows are
    # divided in one process and read in others, by the dimensions of the first array.
    names = sorted(map(str, dataset.variables))
    if not names:
        raise InvalidInputError(
            "The group has no arrays. Name one that has with 'group'; the table 'nodes' lists all."
        )
    for name in arrays or ():
        if name not in names:
            raise InvalidInputError(
                f"'arrays' names {name!r}, but the group has {', '.join(names)}."
            )
    coordinates = {str(it) for it in dataset.coords}
    data = sorted(map(str, dataset.data_vars))
    if arrays is not None:
        data = [it for it in arrays if it not in coordinates]
    else:
        data = [it for it in data if it in set(wanted)] or data
    dims = _shared_dims(dataset, data, named=arrays is not None)
    if not data:
        chosen = [it for it in (arrays or names) if it in names]
        dims = _dims(dataset, max(chosen, key=lambda it: dataset.variables[it].ndim, default=""))
    data = [it for it in data if set(_dims(dataset, it)) == set(dims)]
    columns = [_dimension(dataset, dim, types) for dim in dims]
    for name in names:
        auxiliary = name in coordinates and name not in dims and (arrays is None or name in arrays)
        if auxiliary and set(_dims(dataset, name)) <= set(dims):
            columns.append(_column(dataset, name, types))
    columns += [_column(dataset, name, types) for name in data]
    return TableShape(dims, tuple(columns))


def table_kinds(dataset: xarray.Dataset) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the arrays that can be one table, by their dimensions; those with the most first.

    Coordinates with several dimensions, or none, are in each table whose dimensions they have.
    Arrays of types without a column are left out.
    """
    kinds: dict[frozenset[str], list[str]] = {}
    for name in sorted(map(str, dataset.data_vars)):
        if _has_type(dataset, name):
            kinds.setdefault(frozenset(_dims(dataset, name)), []).append(name)
    if not kinds:
        kinds = {frozenset(_dims(dataset, it)): [it] for it in sorted(map(str, dataset.coords))}
    ordered = sorted(kinds.values(), key=lambda it: -len(_dims(dataset, it[0])))
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for names in ordered:
        dims = _dims(dataset, names[0])
        also = [
            it
            for it in sorted(map(str, dataset.coords))
            if it not in {*dims, *names} and set(_dims(dataset, it)) <= set(dims)
        ]
        found[dims] = (*names, *(it for it in also if _has_type(dataset, it)))
    return found


def _has_type(dataset: xarray.Dataset, name: str) -> bool:
    try:
        _column(dataset, name)
    except InvalidInputError:
        return False
    return True


def _dims(dataset: xarray.Dataset, name: str) -> tuple[str, ...]:
    return tuple(str(it) for it in dataset.variables[name].dims) if name else ()


def _shared_dims(dataset: xarray.Dataset, data: list[str], *, named: bool) -> tuple[str, ...]:
    """Return the dimensions of the rows, in the order of the first array."""
    groups: dict[frozenset[str], list[str]] = {}
    for name in data:
        groups.setdefault(frozenset(_dims(dataset, name)), []).append(name)
    if not groups:
        return ()
    rank = max(map(len, groups))
    best = [names for dims, names in groups.items() if len(dims) == rank]
    if len(best) > 1 or (named and len(groups) > 1):
        shown = "; ".join(
            f"{', '.join(names)} along ({', '.join(_dims(dataset, names[0]))})"
            for names in groups.values()
        )
        raise InvalidInputError(
            f"Arrays of one table share their dimensions, but there are {shown}. Name those of "
            "one kind with 'arrays'."
        )
    return _dims(dataset, best[0][0])


def _dimension(dataset: xarray.Dataset, dim: str, types: Mapping[str, pa.DataType]) -> Column:
    if dim in dataset.variables and dataset.variables[dim].dims == (dim,):
        return _column(dataset, dim, types)
    return Column(dim, pa.int64(), (dim,), variable=False)


def _column(
    dataset: xarray.Dataset, name: str, types: Mapping[str, pa.DataType] = SQL_TYPES
) -> Column:
    variable = dataset.variables[name]
    dtype = cast("Any", variable).dtype
    if dtype.kind == "O" and variable.encoding.get("dtype") == np.dtype(bool):
        dtype = np.dtype(bool)  # with a mark for missing values, for which bool has no room
    marked = _MARKS in variable.encoding
    return Column(name, arrow_type(name, dtype, types), _dims(dataset, name), marked=marked)


def arrow_type(
    name: str, dtype: np.dtype[Any], types: Mapping[str, pa.DataType] = SQL_TYPES
) -> pa.DataType:
    """Return the column type for the type of an array; of numbers, as a table of types says.

    Raises:
        InvalidInputError: no type of Arrow holds it.
    """
    known = types.get(dtype.name)
    if known is not None:
        return known
    match dtype.kind:
        case "M":
            return pa.timestamp("us")
        case "m":
            return pa.duration("us")
        case "U" | "T" | "O":
            return pa.string()
        case "S":
            return pa.binary()
        case _:
            advice = "Store real and imaginary parts as two arrays" if dtype.kind == "c" else ""
            raise InvalidInputError(
                f"The array {name!r} is of the type {dtype}, for which there is no column type. "
                f"{advice or 'Leave it out'}, and name the others with 'arrays'; in Spark, the "
                "layout 'chunks' has its chunks."
            )


def check_type(column: Column, wanted: pa.DataType) -> None:
    """Check that a column can be read as the type in the caller's schema.

    Raises:
        InvalidInputError: values could be lost.
    """
    own = column.type
    wider = own in _WIDER and wanted in _WIDER and _WIDER.index(own) <= _WIDER.index(wanted)
    floats = own == pa.float32() and wanted == pa.float64()
    instants = own == pa.timestamp("us") and wanted == pa.timestamp("us", tz="UTC")
    # As these columns were in earlier versions; a number that is rounded is an error then.
    doubles = column.marked and wanted == pa.float64()
    if not (own == wanted or wider or floats or instants or doubles):
        raise InvalidInputError(
            f"The schema has {column.name!r} as {wanted}, but it is {own}. Read it as {own}, and "
            "cast it in the query."
        )


def to_arrow(
    values: npt.NDArray[Any], wanted: pa.DataType, *, nan_as_null: bool = True
) -> pa.Array[Any]:
    """Convert one-dimensional values to Arrow; NaT, and NaN on request, become null."""
    kind = values.dtype.kind
    if isinstance(values, np.ma.MaskedArray):
        return _masked(values, wanted)
    if kind in "MmO" or kind == "T":
        return _objects(values, wanted)
    if values.dtype == np.float16:
        values = values.astype(np.float32)
    values = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))
    if kind in "US":
        return pa.array(values.tolist(), wanted)
    # Arrow wants native byte order, and copies nothing then. `from_pandas` makes NaN null in the
    # same pass.
    array = pa.array(values, from_pandas=nan_as_null and kind == "f")
    return array if array.type == wanted else array.cast(wanted)


def _masked(values: np.ma.MaskedArray[Any, Any], wanted: pa.DataType) -> pa.Array[Any]:
    """Return integers of which some are missing.

    Raises:
        InvalidInputError: doubles are wanted, and one has no double that is equal to it.
    """
    array = pa.array(np.asarray(values.data), mask=np.ma.getmaskarray(values))
    try:
        return array if array.type == wanted else array.cast(wanted)
    except pa.ArrowInvalid as error:
        raise InvalidInputError(
            f"An array of integers cannot be read as {wanted}: {error}. Read it as {array.type}, "
            "and cast it in the query."
        ) from error


def _objects(values: npt.NDArray[Any], wanted: pa.DataType) -> pa.Array[Any]:
    if values.dtype.kind in "Mm":
        moments = pa.array(_microseconds(values))
        return moments if moments.type == wanted else moments.cast(wanted)
    if pa.types.is_timestamp(wanted) or pa.types.is_duration(wanted):
        raise _of_another_calendar(values[0])
    if pa.types.is_boolean(wanted):
        return pa.array(values.tolist(), wanted, from_pandas=True)
    return pa.array([_text(it) for it in values.tolist()], wanted)


def _microseconds(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return times or durations in microseconds.

    Raises:
        InvalidInputError: they do not have one, being too far away.
    """
    unit = np.dtype(f"{values.dtype.kind}8[us]")
    try:
        found = values.astype(unit)
        if not np.can_cast(values.dtype, unit, "safe"):
            return found  # from a finer unit, which all fit
        if ((found.astype(values.dtype) == values) | np.isnat(values)).all():
            return found  # old versions of NumPy wrap others
    except OverflowError:
        pass
    raise InvalidInputError(
        "An array has times more than 292,000 years from 1970, which there is no type for. Leave "
        "the array out: name the others with 'arrays'; in Spark, the layout 'chunks' has its "
        "chunks."
    )


def _text(value: object) -> str | None:
    """Return text unchanged, and a date of a non-standard calendar in ISO 8601."""
    if value is None or (isinstance(value, float) and value != value):  # noqa: PLR0124 -- NaN
        return None
    written = getattr(value, "isoformat", None)
    return written() if written is not None else str(value)


def values_of(variable: xarray.Variable) -> npt.NDArray[Any]:
    """Return the values of a variable; masked where integers of 64 bits are missing.

    Raises:
        InvalidInputError: it has times before 1582-10-15 in the mixed calendar of CF, `standard`,
            which xarray takes for days of the calendar of today; or its attributes are not what
            CF says.
    """
    try:
        values = variable.to_numpy()
    except TypeError as error:  # a scale or an offset that is no number
        raise _undecodable(error) from error
    stored = variable.encoding
    # Nanoseconds begin in 1677, and no other time can be compared with them.
    counted = values.dtype.kind == "M" and values.dtype != np.dtype("M8[ns]")
    if counted and "units" in stored and str(stored.get("calendar", "standard")).lower() in _MIXED:
        before = values < np.datetime64("1582-10-15", "us")
        if before.any():
            raise _of_another_calendar(values[before][0])
    if _MARKS in stored:
        return np.ma.masked_array(values, np.isin(values, stored[_MARKS]))
    return values


def _of_another_calendar(value: object) -> InvalidInputError:
    return InvalidInputError(
        f"An array of times has {value!s} of another calendar among others, so that they make no "
        "column of timestamps. Read the stored numbers by setting 'decode' to "
        "false, or leave the array out: name the others with 'arrays'."
    )


def dimension_values(
    dataset: xarray.Dataset, column: Column, span: tuple[int, int], source: GroupSource
) -> pa.Array[Any]:
    """Return a range of the values along a dimension, as the table shows them."""
    if column.variable:
        values = values_of(dataset.variables[column.name][span[0] : span[1]])
    else:
        values = np.arange(*span)
    return to_arrow(values, column.type, nan_as_null=source.nan_as_null)


@dataclass(frozen=True, slots=True)
class Cells:
    """Values of some cells of a table, read once, which become rows in batches."""

    dims: tuple[str, ...]
    counts: tuple[int, ...]
    columns: tuple[Column, ...]
    values: tuple[npt.NDArray[Any], ...]
    schema: pa.Schema
    source: GroupSource

    @classmethod
    def load(
        cls,
        dataset: xarray.Dataset,
        shape: TableShape,
        places: Sequence[Places],
        schema: pa.Schema,
        source: GroupSource,
    ) -> Self:
        """Read cells.

        Args:
            dataset: the group.
            shape: columns of the table.
            places: the indices to read along each dimension, ascending.
            schema: the columns to return, in order.
            source: how to show values, and how many rows a batch has.

        Memory: the values of these cells.
        """
        counts = tuple(len(it) for it in places)
        at = dict(zip(shape.dims, places, strict=True))
        columns = tuple(shape.column(name) for name in schema.names) if all(counts) else ()
        values = tuple(_load(dataset, column, shape.dims, at) for column in columns)
        return cls(shape.dims, counts, columns, values, schema, source)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return the rows in C order; memory: one batch beside the values."""
        total = prod(self.counts)
        if not total:
            return
        parts = [self._column(*it) for it in zip(self.columns, self.values, strict=True)]
        for start in range(0, total, self.source.batch_rows):
            stop = min(start + self.source.batch_rows, total)
            arrays = [part(start, stop) for part in parts]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(
        self, column: Column, values: npt.NDArray[Any]
    ) -> Callable[[int, int], pa.Array[Any]]:
        """Return a function from a range of rows to their values."""

        def shown(some: npt.NDArray[Any]) -> pa.Array[Any]:
            kind = self.schema.field(column.name).type
            return to_arrow(some, kind, nan_as_null=self.source.nan_as_null)

        flat = values.reshape(-1)
        axes = [axis for axis, dim in enumerate(self.dims) if dim in column.dims]
        if len(axes) == len(self.dims):
            return lambda start, stop: shown(flat[start:stop])
        after = self.counts[axes[-1] + 1 :] if axes else self.counts
        if not axes or axes == list(range(axes[0], axes[-1] + 1)):
            # Converted before they are repeated: there are few of them.
            return partial(_repeated, shown(flat), prod(after))

        def gathered(start: int, stop: int) -> pa.Array[Any]:
            index = np.unravel_index(np.arange(start, stop), self.counts)
            return shown(values[tuple(index[axis] for axis in axes)])

        return gathered


def _repeated(values: pa.Array[Any], every: int, start: int, stop: int) -> pa.Array[Any]:
    """Return a range of: values, each `every` times in a row, and all of that over and over."""
    kind, buffers = values.type, values.buffers()
    plain = len(buffers) == 2 and kind.bit_width in {8, 16, 32, 64}  # validity, and numbers
    if not plain or values.null_count:
        return values.take(pa.array(_cycled(np.arange(len(values)), every, start, stop)))
    data: Any = buffers[1]
    dtype = np.dtype(f"u{kind.bit_width // 8}")
    numbers = np.frombuffer(data, dtype, len(values), values.offset * dtype.itemsize)
    buffer: Any = pa.py_buffer(_cycled(numbers, every, start, stop))
    return pa.Array.from_buffers(kind, stop - start, [None, buffer])


def _cycled(values: npt.NDArray[Any], every: int, start: int, stop: int) -> npt.NDArray[Any]:
    period = len(values) * every
    if period <= stop - start:
        # With values a b c, each twice, rows 4 to 9 are: c c | a a b.
        first = start % period
        times = -(-(first + stop - start) // period)
        return np.tile(np.repeat(values, every), times)[first : first + stop - start]
    first, end = start // every, -(-stop // every)
    runs = values[np.arange(first, end) % len(values)]
    if every <= stop - start:
        return np.repeat(runs, every)[start - first * every :][: stop - start]
    lengths = np.full(len(runs), every)  # parts of two at most
    lengths[0] -= start - first * every
    lengths[-1] -= end * every - stop
    return np.repeat(runs, lengths)


def _load(
    dataset: xarray.Dataset, column: Column, dims: tuple[str, ...], at: dict[str, Places]
) -> npt.NDArray[Any]:
    """Read the values of a column, with its dimensions in the order of the table."""
    if not column.variable:
        return at[column.dims[0]]
    variable = dataset.variables[column.name]
    # One slice for each dimension, and the places are taken from it: lazy arrays decode whole
    # chunks anyway, and reading single places would decode a chunk for each.
    spans = {dim: slice(int(at[dim][0]), int(at[dim][-1]) + 1) for dim in column.dims}
    ordered = [dim for dim in dims if dim in column.dims]
    values = values_of(variable.isel(spans).transpose(*ordered))
    for axis, dim in enumerate(ordered):
        if len(at[dim]) < values.shape[axis]:
            values = np.take(values, at[dim] - at[dim][0], axis=axis)
    return values if values.flags.c_contiguous else values.copy()  # with their mask
