"""The arrays that a table's rows are written to, and where along them rows belong."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from icechunk_async.errors import InvalidInputError, MissingCoordinatesError, NodeNotFoundError
from icechunk_async.spark.arrays import open_array, workspace_of
from icechunk_async.spark.axes import Axis, check_unambiguous
from icechunk_async.spark.chunk_grid import ChunkGrid
from icechunk_async.spark.encoding import Encoding
from icechunk_async.spark.growing import Growth, axis_to_append

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy.typing as npt
    import xarray

    from icechunk_async.format.ids import NodeId
    from icechunk_async.spark.write_options import WriteOptions
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["WriteTarget", "coordinates_of", "open_dataset", "shared_grid"]


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
        """Answer the grid that all arrays share, as long as they may become.

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
    """Answer the grid of arrays that have the same.

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
    """Answer the coordinates of a dimension, or the numbers of its places if it has none.

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
    """Answer the dimensions of the arrays that columns are named after, and these."""
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
