"""The arrays to which rows are written: dimensions, encodings, and growth along one dimension.

A task learns from its rows how long the appended dimension has to be, but not from the rows of
others. So tasks write to arrays that are long enough for any, and the commit shortens these.
"""

from __future__ import annotations

import json
import struct
import warnings
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    AlreadyExistsError,
    DuplicateRowsError,
    InvalidInputError,
    MissingCoordinatesError,
    NodeNotFoundError,
    UnsortedCoordinatesError,
)
from icechunk_async.spark.grid.axes import Appended, Axis, Steps, check_unambiguous
from icechunk_async.spark.grid.chunks import ChunkGrid
from icechunk_async.spark.shared import open_array, workspace_of
from icechunk_async.spark.write.leftovers import clear_leftovers
from icechunk_async.spark.write.values import Encoding, check_read_back, encode_column

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy.typing as npt
    import xarray

    from icechunk_async.format.ids import NodeId
    from icechunk_async.spark.options import WriteOptions
    from icechunk_async.sync.store import IcechunkStore

__all__ = [
    "Growth",
    "WriteTarget",
    "axis_to_append",
    "coordinates_of",
    "is_sorted",
    "open_dataset",
    "set_length",
    "shared_grid",
]


_APPENDED_CHUNKS: Final = 10
_APPENDED: Final = 1_000
"""The most coordinates that one write appends without `append-values` or `max-append`: this
number, or that of the chunks above, whichever is more."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A dimension that is appended to.

    Attributes:
        axis: its indices; existing ones are not written to.
        length: its length now.
        most: the length that it may reach.
        arrays: paths of all arrays with this dimension, and the number of the axis in each.
        coordinate: path and encoding of its coordinate array, if it has one.
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

    def filled(
        self,
        parts: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]],
        *,
        fill_gaps: bool,
        allow: bool,
    ) -> npt.NDArray[Any]:
        """Return the new coordinates, as rows gave them, up to the last one.

        Args:
            parts: places and coordinates of the rows of each task.
            fill_gaps: count on by steps where no row has a coordinate.
            allow: accept coordinates that a packed array gives back otherwise.

        Raises:
            ValueRefusedError: a packed array would give back other coordinates.
            AmbiguousCoordinatesError: rows of two tasks have one place and different coordinates.
            MissingCoordinatesError: no row has a coordinate before the last one.
        """
        steps = self.axis.steps
        if steps is None:
            self._check(self.axis.values[self.length :], allow=allow)
            return self.axis.values[self.length :]
        appended = Appended(self.axis, self.length)
        for places, values in parts:
            appended.add(places, values)
        places, given = appended.columns()
        self._check(given, allow=allow)
        count = int(places[-1]) + 1 - self.length if len(places) else 0
        every = steps.values(count).astype(self.axis.values.dtype)
        if len(places) < count and not fill_gaps:
            missing = np.setdiff1d(np.arange(count), places - self.length)
            raise MissingCoordinatesError(
                f"No row has {every[missing[0]]!s} in column {self.axis.name!r}, and others have "
                f"later coordinates up to {given[-1]!s}: {len(missing):,} are missing. Nothing was "
                "published. If that is meant, option('fill-gaps', 'true') adds them, empty.",
                dimension=self.axis.name,
            )
        every[places - self.length] = given
        return every

    def _check(self, new: npt.NDArray[Any], *, allow: bool) -> None:
        if self.coordinate is not None and not allow:
            check_read_back(new, self.coordinate[1])

    def finish(self, store: IcechunkStore, new: npt.NDArray[Any]) -> None:
        """Shorten the arrays to the length that was written, and write the new coordinates."""
        length = self.length + len(new)
        for path, axis in self.arrays:
            set_length(store, path, axis, length)
        if not len(new):
            return
        written = None if self.coordinate is None else self.coordinate[0]
        others = [(path, axis) for path, axis in self.arrays if path != written]
        clear_leftovers(store, others, self.length)
        if self.coordinate is not None:
            path, encoding = self.coordinate
            array = open_array(store, path, write=True)
            name = self.axis.name
            array[self.length : length] = encode_column(
                _as_arrow(new),
                encoding,
                may_allow=False,  # another coordinate, such as a shorter text, is another row
                named=lambda row: f"of {name}={new[row]!s}",
            )


def _as_arrow(values: npt.NDArray[Any]) -> pa.Array[Any]:
    return pa.array(values.tolist() if values.dtype.kind in "OUT" else values)


def axis_to_append(
    name: str,
    values: npt.NDArray[Any],
    given: tuple[Any, ...] | None,
    *,
    indexed: bool,
    most: int = _APPENDED,
) -> tuple[Axis, int]:
    """Return the axis of a dimension that is appended to, and the length that it may reach.

    Args:
        name: name of the dimension.
        values: its existing coordinates.
        given: the coordinates to append; None if they continue in equal steps.
        indexed: whether the dimension has no coordinates, so that rows give indices.
        most: how many may be appended in equal steps.

    Raises:
        AlreadyExistsError: a coordinate to append exists.
        UnsortedCoordinatesError: existing coordinates are sorted, and the new ones do not
            continue their order.
        InvalidInputError: there are no equal steps, and no coordinates were given.
    """
    length = len(values)
    if given is not None:
        more = _as_coordinates(name, given, values.dtype)
        if len(np.unique(more)) != len(more) or np.isin(more, values).any():
            raise AlreadyExistsError(
                f"The option 'append-values' names coordinates of {name!r} that exist "
                "already, or one of them twice. Leave them out, or replace values with "
                "mode('overwrite').",
                dimension=name,
            )
        every = np.concatenate([values, more])
        if length > 1 and is_sorted(values) and not is_sorted(every):
            raise UnsortedCoordinatesError(
                f"The coordinates of {name!r} are sorted, and those in the option 'append-values' "
                f"do not continue in their order after {values[-1]!s}. Append later ones only.",
                dimension=name,
            )
        return Axis(name, every, first=length), len(every)
    steps = Steps(np.int64(length - 1), np.int64(1), most) if indexed else None
    steps = steps or Steps.after(values, most)
    if steps is None:
        raise InvalidInputError(
            f"The coordinates of {name!r} do not have equal steps, so the places of appended rows "
            "are unknown. List the new coordinates in the option 'append-values' as JSON, or use "
            "icechunk_async.spark.write_rows, which finds them."
        )
    return Axis(name, values, first=length, steps=steps), length + most


def is_sorted(values: npt.NDArray[Any]) -> bool:
    """Return whether coordinates ascend or descend."""
    if values.dtype.kind == "T":
        values = values.astype(object)
    return bool((values[1:] > values[:-1]).all() or (values[1:] < values[:-1]).all())


def _as_coordinates(name: str, given: tuple[Any, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        # As objects, since new texts may be longer than the existing ones.
        return np.asarray(given, object if dtype.kind in "UT" else dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"The option 'append-values' has a value that is no coordinate of {name!r}, which are "
            f"{dtype}: {error}. Give a JSON list of such values."
        ) from error


def set_length(store: IcechunkStore, path: str, axis: int, length: int) -> None:
    """Set the length of an array along one axis, without touching chunks.

    Raises:
        InvalidInputError: the chunk grid is irregular.
    """
    key = f"{path}/zarr.json"
    prototype = default_buffer_prototype()
    data = sync(store.get(key, prototype))
    assert data is not None  # the array was opened before
    document = json.loads(data.to_bytes())
    if document["chunk_grid"]["name"] != "regular":
        raise InvalidInputError(
            f"The chunks of {path!r} differ in size, so rows cannot be appended. Make the array "
            "longer first, and use mode('overwrite')."
        )
    # Not Array.resize, which deletes chunks beyond the end when it shrinks an array.
    document["shape"][axis] = length
    sync(store.set(key, prototype.buffer.from_bytes(json.dumps(document).encode())))


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """The arrays to which rows are written; plain data.

    Attributes:
        axes: the dimensions of the arrays, in order.
        variables: path and encoding of each array.
        growth: the dimension that is appended to, if there is one.
        nodes: ids of all nodes that are written to, which tell a replaced array from the old one.
    """

    axes: tuple[Axis, ...]
    variables: tuple[tuple[str, Encoding], ...]
    growth: Growth | None
    nodes: tuple[NodeId, ...]

    @classmethod
    def look(
        cls, store: IcechunkStore, options: WriteOptions, columns: Sequence[str]
    ) -> WriteTarget:
        """Look up the arrays that columns are named after.

        Raises:
            InvalidInputError: columns and arrays do not go together.
            MissingCoordinatesError: a dimension has no column.
            AmbiguousCoordinatesError: a dimension has a coordinate twice.
            AlreadyExistsError, UnsortedCoordinatesError: coordinates cannot be appended.
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

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The names of the dimensions, in order."""
        return tuple(it.name for it in self.axes)

    @property
    def old(self) -> tuple[int, int] | None:
        """The axis that is appended to and its length before, or None; see `put_block`."""
        growth = self.growth
        return None if growth is None else (self.axes.index(growth.axis), growth.length)

    def row_at(self, index: Sequence[int]) -> str:
        """Return the coordinates of a cell in words, such as `time=2020-01-01, x=0`."""
        return ", ".join(
            f"{axis.name}={axis.at(place)!s}" for axis, place in zip(self.axes, index, strict=True)
        )

    def duplicate(self, index: tuple[int, ...]) -> DuplicateRowsError:
        """Return the error for several rows of the cell at an index."""
        name = self.variables[0][1].name
        return DuplicateRowsError(
            f"Several rows have {self.row_at(index)}: the cell {index} of {name!r}. Nothing was "
            "published. Leave one row for each cell, for example with dropDuplicates on the "
            "coordinates.",
            array=name,
            index=index,
        )

    def grid(self, store: IcechunkStore) -> ChunkGrid:
        """Return the common chunk grid of the arrays at the length that they may reach.

        Raises:
            InvalidInputError: their chunks differ.
        """
        arrays = {it.name: open_array(store, path) for path, it in self.variables}
        grid = shared_grid({name: ChunkGrid.of(array) for name, array in arrays.items()})
        if self.growth is None:
            return grid
        at = self.axes.index(self.growth.axis)
        array = next(iter(arrays.values()))
        return grid.grown(at, (array.shards or array.chunks)[at], self.growth.most)


def shared_grid(grids: dict[str, ChunkGrid]) -> ChunkGrid:
    """Return the common chunk grid of several arrays.

    Raises:
        InvalidInputError: their chunk grids differ.
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
    """Open a group, all of whose dimensions must have names, as a lazy dataset.

    Raises:
        NodeNotFoundError: there is no such group.
        InvalidInputError: it cannot be opened as a dataset.
    """
    # Takes seconds, and processes that only commit do without.
    import xarray  # noqa: PLC0415
    from xarray.coders import CFDatetimeCoder  # noqa: PLC0415

    opening = cast("Any", xarray.open_dataset)  # pyright: ignore[reportUnknownMemberType]
    try:
        with warnings.catch_warnings():
            # A FutureWarning on times without a calendar, which no user of Spark can act on.
            warnings.simplefilter("ignore")
            dataset: xarray.Dataset = opening(
                store,
                engine="zarr",
                group=group or None,
                consolidated=False,
                zarr_format=3,
                chunks=None,
                create_default_indexes=False,
                # As Spark counts: years outside 1678 to 2262, which nanoseconds have not, too.
                decode_times=CFDatetimeCoder(time_unit="us"),
            )
    except FileNotFoundError as error:
        raise NodeNotFoundError(
            f"There is no group {group!r} to write to. Create it and its arrays first: a table "
            "does not say how they are laid out.",
            path=group,
        ) from error
    # Older versions of xarray assert that attributes have the type that it writes.
    except (AssertionError, KeyError, ValueError, TypeError, struct.error) as error:
        why = str(error) or "An attribute, such as '_FillValue', has another type."
        raise InvalidInputError(
            f"Rows cannot be written to the group {group!r}: {why} Rows find their places by "
            "the names of dimensions, so every array of the group needs them, and attributes that "
            "are what CF says."
        ) from error
    return dataset


def coordinates_of(dataset: xarray.Dataset, dim: str) -> npt.NDArray[Any]:
    """Return the coordinates of a dimension, or its indices if it has none.

    Times are in microseconds, like those of Spark.

    Raises:
        InvalidInputError: they are dates of a non-standard calendar, which Spark does not have.
    """
    if dim not in dataset.variables:
        return np.arange(dataset.sizes[dim], dtype=np.int64)
    values = np.asarray(dataset.variables[dim].values)
    if values.dtype.kind in "Mm":
        return values.astype(f"{values.dtype.kind}8[us]")
    if values.dtype == object and values.size and not isinstance(values[0], str):
        raise InvalidInputError(
            f"The coordinates of {dim!r} are of {type(values[0]).__name__}, a type that no column "
            "can have. Write such arrays with map_chunks."
        )
    return values


def _ids(store: IcechunkStore, paths: Sequence[str]) -> tuple[NodeId, ...]:
    workspace = workspace_of(store.session)
    nodes = [workspace.node(f"/{path}") for path in paths]
    return tuple(node.id for node in nodes if node is not None)


def _variables(
    dataset: xarray.Dataset, columns: Sequence[str]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the dimensions of the arrays that columns are named after, and their names."""
    dims = {str(it) for it in dataset.dims}
    variables = [it for it in columns if it not in dims]
    unknown = [it for it in variables if it not in dataset.variables]
    if unknown or not variables:
        raise InvalidInputError(
            f"There are no arrays for the columns {unknown}. Arrays are "
            f"{sorted(map(str, dataset.variables))}; create others first, or drop such columns."
            if unknown
            else "The table has only columns of coordinates: there is nothing to write."
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
    _check_dims(dataset, variables[0], found)
    return tuple(str(it) for it in found), variables


def _check_dims(dataset: xarray.Dataset, name: str, dims: Sequence[Hashable]) -> None:
    """Raise InvalidInputError unless a column of its name can say where rows are in a dimension."""
    for dim in dims:
        why = ""
        if dims.count(dim) > 1:
            why = f"the dimension {dim!r} more than once"
        elif dim in dataset.variables and dataset.variables[dim].dims != (dim,):
            why = f"the dimension {dim!r}, and an array of that name is not its coordinate"
        if why:
            raise InvalidInputError(
                f"The array {name!r} has {why}, so that no column says where a row belongs. Write "
                "it with write_region, map_chunks or xarray."
            )


def _chunk(store: IcechunkStore, path: str, axis: int) -> int:
    array = open_array(store, path)
    return (array.shards or array.chunks)[axis]


def _growth(
    store: IcechunkStore, options: WriteOptions, dataset: xarray.Dataset, dims: tuple[str, ...]
) -> Growth:
    dim = options.append_dim
    assert dim is not None  # checked by the caller
    if dim not in dims:
        raise InvalidInputError(
            f"The arrays cannot be appended to along {dim!r}: their dimensions are {list(dims)}."
        )
    values = coordinates_of(dataset, dim)
    indexed = dim not in dataset.variables
    arrays = tuple(
        (options.path_of(str(name)), it.dims.index(dim))
        for name, it in dataset.variables.items()
        if dim in it.dims
    )
    most = options.max_append or max(
        _APPENDED, *(_APPENDED_CHUNKS * _chunk(store, path, at) for path, at in arrays)
    )
    axis, most = axis_to_append(dim, values, options.append_values, indexed=indexed, most=most)
    coordinate = None
    if not indexed:
        path = options.path_of(dim)
        stored = open_array(store, path).dtype
        coordinate = path, Encoding.of(dataset.variables[dim], dim, stored)
    return Growth(axis, len(values), most, arrays, coordinate)
