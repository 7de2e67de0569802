"""The arrays that rows are written to: places, encoding, growth.

Tasks learn from their rows how far the dimension goes, and none knows of the others'. So all of
them write to arrays that are made long enough for any, and the commit cuts these to what came.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from icechunk_async.errors import (
    AlreadyExistsError,
    InvalidInputError,
    MissingCoordinatesError,
    NodeNotFoundError,
    UnsortedCoordinatesError,
)
from icechunk_async.spark.datasets import open_array, workspace_of
from icechunk_async.spark.grid.axes import Axis, Steps, check_unambiguous
from icechunk_async.spark.grid.chunks import ChunkGrid

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import numpy.typing as npt
    import xarray

    from icechunk_async.format.ids import NodeId
    from icechunk_async.spark.options import WriteOptions
    from icechunk_async.sync.store import IcechunkStore

__all__ = [
    "Encoding",
    "Growth",
    "WriteTarget",
    "axis_to_append",
    "coordinate_column",
    "coordinates_of",
    "is_sorted",
    "open_dataset",
    "set_length",
    "shared_grid",
    "value_column",
]


_KEPT: Final = ("_FillValue", "missing_value", "scale_factor", "add_offset", "units", "calendar")


@dataclass(frozen=True, slots=True)
class Encoding:
    """How an array stores what users see: CF scale, offset, fill value and units of time.

    Attributes:
        name: of the array.
        dtype: of what is stored.
        attributes: those of them that the array has.
    """

    name: str
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, variable: xarray.Variable, name: str, dtype: np.dtype[Any]) -> Encoding:
        """Return the encoding that xarray found when it opened a variable."""
        found = {key: it for key, it in variable.encoding.items() if key in _KEPT}
        return cls(name, dtype, found)

    @property
    def fill(self) -> Any:
        """What is stored where there is no value; None if nothing says so."""
        return self.attributes.get("_FillValue", self.attributes.get("missing_value"))

    def encode(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return values of one axis as they are stored.

        Raises:
            InvalidInputError: the array cannot hold one of them.
        """
        if self.attributes:
            # These cost seconds, and few arrays need them here.
            import xarray  # noqa: PLC0415
            from xarray import conventions  # noqa: PLC0415

            try:
                # Without the type: xarray would let numbers that are too large wrap around.
                variable = xarray.Variable(("row",), values, {}, dict(self.attributes))
                encode = cast("Any", conventions.encode_cf_variable)  # pyright: ignore[reportUnknownMemberType]
                values = np.asarray(encode(variable).values)
            except (ValueError, OverflowError) as error:
                raise InvalidInputError(
                    f"Values cannot be stored in {self.name!r}: {error}"
                ) from error
        if self.dtype.kind not in "biu":
            return values.astype(self.dtype)
        if {"scale_factor", "add_offset"} & set(self.attributes):
            values = np.rint(values)
        with np.errstate(invalid="ignore"):
            stored = values.astype(self.dtype)
        if (stored != values).any():
            value = values[stored != values][0]
            raise InvalidInputError(
                f"{self.name!r} cannot hold {value!s}: it is an array of {self.dtype}. Convert "
                "the column, or leave out such rows."
            )
        return stored


def coordinate_column(column: pa.Array[Any], name: str) -> npt.NDArray[Any]:
    """Return a column of coordinates.

    Raises:
        MissingCoordinatesError: a row has null.
    """
    if column.null_count:
        raise MissingCoordinatesError(
            f"A row has null in column {name!r}, which says where it belongs. Drop such rows.",
            dimension=name,
        )
    return _numpy(column)


def value_column(column: pa.Array[Any], encoding: Encoding) -> npt.NDArray[Any]:
    """Return a column of values; what is null becomes NaN, or what the array has in its place.

    Raises:
        InvalidInputError: there is null, and the array has nothing for it.
    """
    if column.null_count and not (
        pa.types.is_floating(column.type) or pa.types.is_temporal(column.type)
    ):
        fill = encoding.fill
        scaled = {"scale_factor", "add_offset"} & set(encoding.attributes)
        if encoding.dtype.kind == "f" or (scaled and fill is not None):
            return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
        if fill is None:
            raise InvalidInputError(
                f"A row has null in column {encoding.name!r}, and the array says nothing of what "
                "stands for no value. Drop such rows, or give the array a _FillValue."
            )
        return np.asarray(column.fill_null(np.asarray(fill).item()).to_numpy(zero_copy_only=False))
    return _numpy(column)


def _numpy(column: pa.Array[Any]) -> npt.NDArray[Any]:
    """Return a column; moments become UTC."""
    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        zone = getattr(column.type, "tz", None)
        column = column.cast(pa.timestamp("ns", tz=zone))
    return np.asarray(column.to_numpy(zero_copy_only=False))


_MOST: Final = 1_000_000
"""Places that one write can append where it was not said how many."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A dimension that becomes longer.

    Attributes:
        axis: its places; those that are there already are not written to.
        length: how long it is now.
        most: how long it may become.
        arrays: all that have it: paths, and the number of their axis.
        coordinate: how its coordinate is stored, if it has one, and the path of that.
    """

    axis: Axis
    length: int
    most: int
    arrays: tuple[tuple[str, int], ...]
    coordinate: tuple[str, Encoding] | None

    def prepare(self, store: IcechunkStore) -> None:
        """Make the arrays long enough for every task."""
        for path, axis in self.arrays:
            set_length(store, path, axis, self.most)

    def finish(self, store: IcechunkStore, length: int) -> None:
        """Cut the arrays to what the tasks wrote, and write the coordinate of that."""
        for path, axis in self.arrays:
            set_length(store, path, axis, length)
        if self.coordinate is not None and length > self.length:
            path, encoding = self.coordinate
            steps = self.axis.steps
            values = (
                self.axis.values[self.length : length]
                if steps is None
                else steps.values(length - self.length)
            )
            array = open_array(store, path, write=True)
            array[self.length : length] = encoding.encode(values)


def axis_to_append(
    name: str, values: npt.NDArray[Any], given: tuple[Any, ...] | None, *, indexed: bool
) -> tuple[Axis, int]:
    """Return the places of a dimension that is appended to, and how long it may become.

    Args:
        name: of the dimension.
        values: the coordinates that are there.
        given: those that follow; without them they follow in equal steps.
        indexed: the dimension has no coordinate, and rows count its places.

    Raises:
        AlreadyExistsError: one that is to follow is there already.
        UnsortedCoordinatesError: they do not go on in the order of those that are there.
        InvalidInputError: it cannot be known how the coordinate goes on.
    """
    length = len(values)
    if given is not None:
        more = _as_coordinates(name, given, values.dtype)
        if len(np.unique(more)) != len(more) or np.isin(more, values).any():
            raise AlreadyExistsError(
                f"The option 'append-values' names coordinates of {name!r} that are there "
                "already, or one of them twice. Leave them out, or replace values with "
                "mode('overwrite').",
                dimension=name,
            )
        every = np.concatenate([values, more])
        if length > 1 and is_sorted(values) and not is_sorted(every):
            raise UnsortedCoordinatesError(
                f"The coordinates of {name!r} are sorted, and those in the option 'append-values' "
                f"do not go on in their order after {values[-1]!s}. Append what comes later only.",
                dimension=name,
            )
        return Axis(name, every, first=length), len(every)
    steps = Steps(np.int64(length - 1), np.int64(1), _MOST) if indexed else None
    steps = steps or Steps.after(values, _MOST)
    if steps is None:
        raise InvalidInputError(
            f"The coordinates of {name!r} do not follow each other in equal steps, so that it is "
            "not known where rows go that are appended. Name the new ones in the option "
            "'append-values', as a JSON list; write_rows of icechunk_async.spark does so."
        )
    return Axis(name, values, first=length, steps=steps), length + _MOST


def is_sorted(values: npt.NDArray[Any]) -> bool:
    """Return whether coordinates ascend or descend."""
    if values.dtype.kind == "T":
        values = values.astype(object)
    return bool((values[1:] > values[:-1]).all() or (values[1:] < values[:-1]).all())


def _as_coordinates(name: str, given: tuple[Any, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        # Text may be longer than what is there.
        return np.asarray(given, object if dtype.kind in "UT" else dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"The option 'append-values' has what is no coordinate of {name!r}, which are "
            f"{dtype}: {error}. Give a JSON list of such."
        ) from error


def set_length(store: IcechunkStore, path: str, axis: int, length: int) -> None:
    """Give an array another length along one axis; chunks stay as they are.

    Raises:
        InvalidInputError: its chunks differ in size.
    """
    key = f"{path}/zarr.json"
    prototype = default_buffer_prototype()
    data = sync(store.get(key, prototype))
    assert data is not None  # it was opened before
    document = json.loads(data.to_bytes())
    if document["chunk_grid"]["name"] != "regular":
        raise InvalidInputError(
            f"The chunks of {path!r} differ in size, and so cannot be appended to in this way. "
            "Make the array longer first, and use mode('overwrite')."
        )
    document["shape"][axis] = length
    sync(store.set(key, prototype.buffer.from_bytes(json.dumps(document).encode())))


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """Where rows are written to; plain data.

    Attributes:
        axes: the dimensions of the arrays, in their order.
        variables: paths of the arrays, and how each stores its values.
        growth: of the dimension that is appended to.
        nodes: ids of all that is written to: an array that was made anew is another one.
    """

    axes: tuple[Axis, ...]
    variables: tuple[tuple[str, Encoding], ...]
    growth: Growth | None
    nodes: tuple[NodeId, ...]

    @classmethod
    def look(
        cls, store: IcechunkStore, options: WriteOptions, columns: Sequence[str]
    ) -> WriteTarget:
        """Look at the arrays that columns are named after.

        Raises:
            InvalidInputError: columns and arrays do not go together.
            MissingCoordinatesError: a dimension has no column.
            AmbiguousCoordinatesError: a dimension has one coordinate twice.
            AlreadyExistsError, UnsortedCoordinatesError: so are coordinates to append.
            NodeNotFoundError: there is no such group.
        """
        dataset = open_dataset(store, options.group)
        dims, names = _variables(dataset, columns)
        variables = tuple(
            (path, Encoding.of(dataset.variables[it], it, open_array(store, path).dtype))
            for it, path in ((it, options.path_of(it)) for it in names)
        )
        growth = _growth(store, options, dataset, dims) if options.append_dim else None
        axes = tuple(
            growth.axis
            if growth is not None and growth.axis.name == it
            else Axis(it, coordinates_of(dataset, it))
            for it in dims
        )
        for it in axes:
            check_unambiguous(it.name, it.values)
        written = [path for path, _ in (*variables, *(growth.arrays if growth else ()))]
        return cls(axes, variables, growth, _ids(store, written))

    def grid(self, store: IcechunkStore) -> ChunkGrid:
        """Return the grid that all arrays share, as long as they may become.

        Raises:
            InvalidInputError: they differ in their chunks.
        """
        arrays = {it.name: open_array(store, path) for path, it in self.variables}
        grid = shared_grid({name: ChunkGrid.of(array) for name, array in arrays.items()})
        if self.growth is None:
            return grid
        at = self.axes.index(self.growth.axis)
        array = next(iter(arrays.values()))
        return grid.grown(at, (array.shards or array.chunks)[at], self.growth.most)


def shared_grid(grids: dict[str, ChunkGrid]) -> ChunkGrid:
    """Return the grid of arrays that have the same.

    Raises:
        InvalidInputError: they differ.
    """
    names = list(grids)
    first = grids[names[0]]
    for name, grid in grids.items():
        if not all(np.array_equal(a, b) for a, b in zip(grid.edges, first.edges, strict=True)):
            raise InvalidInputError(
                f"The chunks of {name!r} are not those of {names[0]!r}. Write arrays that differ "
                "in their chunks one after the other."
            )
    return first


def open_dataset(store: IcechunkStore, group: str) -> xarray.Dataset:
    """Open a group whose arrays all have names for their dimensions.

    Raises:
        NodeNotFoundError: there is no such group.
        InvalidInputError: it cannot be read as a dataset.
    """
    import xarray  # noqa: PLC0415 -- costs seconds, and processes that commit do without

    opening = cast("Any", xarray.open_dataset)  # pyright: ignore[reportUnknownMemberType]
    try:
        with warnings.catch_warnings():
            # How times without a calendar will be read in future versions.
            warnings.simplefilter("ignore")
            dataset: xarray.Dataset = opening(
                store,
                engine="zarr",
                group=group or None,
                consolidated=False,
                zarr_format=3,
                chunks=None,
                create_default_indexes=False,
            )
    except FileNotFoundError as error:
        raise NodeNotFoundError(
            f"There is no group {group!r} to write to. Make it and its arrays first: a table does "
            "not say how they are laid out.",
            path=group,
        ) from error
    except (KeyError, ValueError) as error:
        raise InvalidInputError(
            f"Rows cannot be written to the group {group!r}: {error} Rows find their places by "
            "the names of dimensions, so every array of the group needs them."
        ) from error
    return dataset


def coordinates_of(dataset: xarray.Dataset, dim: str) -> npt.NDArray[Any]:
    """Return the coordinates of a dimension, or the numbers of its places if it has none.

    Times are in microseconds, as Spark has them.

    Raises:
        InvalidInputError: they are of a calendar that has no times in tables.
    """
    if dim not in dataset.variables:
        return np.arange(dataset.sizes[dim], dtype=np.int64)
    values = np.asarray(dataset.variables[dim].values)
    if values.dtype.kind in "Mm":
        return values.astype(f"{values.dtype.kind}8[us]")
    if values.dtype == object and values.size and not isinstance(values[0], str):
        raise InvalidInputError(
            f"The coordinates of {dim!r} are of {type(values[0]).__name__}, of which no column "
            "of a table can be. Write such arrays with map_chunks."
        )
    return values


def _ids(store: IcechunkStore, paths: Sequence[str]) -> tuple[NodeId, ...]:
    workspace = workspace_of(store.session)
    nodes = [workspace.node(f"/{path}") for path in paths]
    return tuple(node.id for node in nodes if node is not None)


def _variables(
    dataset: xarray.Dataset, columns: Sequence[str]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the dimensions of the arrays that columns are named after, and these."""
    dims = {str(it) for it in dataset.dims}
    variables = [it for it in columns if it not in dims]
    unknown = [it for it in variables if it not in dataset.variables]
    if unknown or not variables:
        raise InvalidInputError(
            f"There are no arrays for the columns {unknown}. Arrays are "
            f"{sorted(map(str, dataset.variables))}; make others first, or drop such columns."
            if unknown
            else "The table has no column but coordinates: there is nothing to write."
        )
    shared = {dataset.variables[it].dims for it in variables}
    if len(shared) > 1:
        raise InvalidInputError(
            f"The arrays {variables} differ in their dimensions: {sorted(map(str, shared))}. Write "
            "them one after the other."
        )
    found: tuple[Hashable, ...] = next(iter(shared))
    missing = [str(it) for it in found if str(it) not in columns]
    if missing:
        raise MissingCoordinatesError(
            f"The table has no column {missing[0]!r}, and {variables[0]!r} has that dimension. "
            "Name the columns of coordinates like the dimensions.",
            dimension=missing[0],
        )
    return tuple(str(it) for it in found), variables


def _growth(
    store: IcechunkStore, options: WriteOptions, dataset: xarray.Dataset, dims: tuple[str, ...]
) -> Growth:
    dim = options.append_dim
    assert dim is not None  # asked for
    if dim not in dims:
        raise InvalidInputError(
            f"The arrays cannot be appended to along {dim!r}: their dimensions are {list(dims)}."
        )
    values = coordinates_of(dataset, dim)
    indexed = dim not in dataset.variables
    axis, most = axis_to_append(dim, values, options.append_values, indexed=indexed)
    arrays = tuple(
        (options.path_of(str(name)), it.dims.index(dim))
        for name, it in dataset.variables.items()
        if dim in it.dims
    )
    coordinate = None
    if not indexed:
        path = options.path_of(dim)
        stored = open_array(store, path).dtype
        coordinate = path, Encoding.of(dataset.variables[dim], dim, stored)
    return Growth(axis, len(values), most, arrays, coordinate)
