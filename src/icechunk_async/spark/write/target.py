"""The arrays to which rows are written: their dimensions, encodings and common chunk grid."""

from __future__ import annotations

import struct
import warnings
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    DuplicateRowsError,
    InvalidInputError,
    MissingCoordinatesError,
    NodeNotFoundError,
)
from icechunk_async.spark.grid import Axis, ChunkGrid, check_unambiguous
from icechunk_async.spark.shared import open_array, workspace_of
from icechunk_async.spark.write.growth import MOST_APPENDED, Growth, axis_to_append
from icechunk_async.spark.write.values import Encoding

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy.typing as npt
    import xarray

    from icechunk_async.format.ids import NodeId
    from icechunk_async.spark.options import WriteOptions
    from icechunk_async.sync.store import IcechunkStore

__all__ = [
    "WriteTarget",
    "coordinates_of",
    "open_dataset",
    "shared_grid",
]


# Also arrays with chunks of many steps must grow by more than a chunk in one write.
_APPENDED_CHUNKS: Final = 10


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
        # Any of them: `shared_grid` has found all grids to be the same, and an irregular one does
        # not grow.
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
                # An index reads all coordinates, of which only those of the written dimensions are
                # wanted.
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
    # Text is of objects too, and the first value says which of both it is.
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
    why = "" if dims else "no dimension"
    for dim in dims:
        if dims.count(dim) > 1:
            why = f"the dimension {dim!r} more than once"
        elif dim in dataset.variables and dataset.variables[dim].dims != (dim,):
            why = f"the dimension {dim!r}, and an array of that name is not its coordinate"
    if why:
        raise InvalidInputError(
            f"The array {name!r} has {why}, so that no column says where a row belongs. Write it "
            "with write_region, map_chunks or xarray."
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
        MOST_APPENDED, *(_APPENDED_CHUNKS * _chunk(store, path, at) for path, at in arrays)
    )
    axis, most = axis_to_append(dim, values, options.append_values, indexed=indexed, most=most)
    coordinate = None
    if not indexed:
        path = options.path_of(dim)
        stored = open_array(store, path).dtype
        coordinate = path, Encoding.of(dataset.variables[dim], dim, stored)
    return Growth(axis, len(values), most, arrays, coordinate)
