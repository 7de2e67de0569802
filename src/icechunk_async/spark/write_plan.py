"""What a table's rows are written to: looked up once, and sent to every task as plain data."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xarray

from icechunk_async.errors import (
    AlreadyExistsError,
    InvalidInputError,
    MissingCoordinatesError,
    NodeNotFoundError,
)
from icechunk_async.spark.arrays import open_array
from icechunk_async.spark.cooperative import CooperativeWrite
from icechunk_async.spark.encoding import Encoding
from icechunk_async.spark.growing import Growth, axis_to_append
from icechunk_async.spark.row_places import Axis
from icechunk_async.sync.portal import run

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy.typing as npt

    from icechunk_async.spark.transactions import Transaction
    from icechunk_async.spark.write_options import WriteOptions
    from icechunk_async.sync import Session

__all__ = ["WritePlan", "coordinates_of"]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One write of rows.

    Attributes:
        write: what tasks take part in.
        options: what was asked for.
        axes: the dimensions of the arrays, in their order.
        variables: paths of the arrays, and how each stores its values.
        growth: of the dimension that is appended to.
        is_done: there is nothing to do.
    """

    write: CooperativeWrite
    options: WriteOptions
    axes: tuple[Axis, ...]
    variables: tuple[tuple[str, Encoding], ...]
    growth: Growth | None
    is_done: bool

    @classmethod
    def begin(
        cls,
        options: WriteOptions,
        columns: Sequence[str],
        *,
        overwrite: bool,
        transaction: Transaction | None = None,
        cores: int = 1,
    ) -> WritePlan:
        """Look at the arrays, and begin to write.

        Args:
            options: what was asked for.
            columns: names of the table's.
            overwrite: rows replace what is there; else they are appended.
            transaction: names the write, if that is known yet.
            cores: tasks that run at a time in one executor.

        Raises:
            InvalidInputError: columns and arrays do not go together.
            MissingCoordinatesError: a dimension has no column.
            AlreadyExistsError: something is there, and was not to be.
        """
        _check_mode(options, overwrite=overwrite)
        repository = options.open()
        session = repository.readonly_session(options.branch)
        dataset = _open(session, options.group)
        dims, variables = _variables(dataset, columns)
        encodings = tuple(
            (
                _path(options, it),
                Encoding.of(dataset.variables[it], it, _stored(session, options, it)),
            )
            for it in variables
        )
        growth = _growth(session, options, dataset, dims) if options.append_dim else None
        axes = tuple(
            growth.axis
            if growth is not None and growth.axis.name == it
            else Axis(it, coordinates_of(dataset, it))
            for it in dims
        )
        write = CooperativeWrite.begin(
            repository,
            options.branch,
            prepare=None if growth is None else growth.prepare,
            cores=cores,
        )
        done = write.is_done(transaction) or _is_written(session, options, encodings)
        return cls(write, options, axes, encodings, growth, done)


def coordinates_of(dataset: xarray.Dataset, dim: str) -> npt.NDArray[Any]:
    """Answer the coordinates of a dimension, or the numbers of its places if it has none.

    Raises:
        InvalidInputError: they are of a calendar that has no times in tables.
    """
    if dim not in dataset.variables:
        return np.arange(dataset.sizes[dim], dtype=np.int64)
    values = np.asarray(dataset.variables[dim].values)
    if values.dtype.kind == "M":
        return values.astype("datetime64[ns]")
    if values.dtype == object and values.size and not isinstance(values[0], str):
        raise InvalidInputError(
            f"The coordinates of {dim!r} are of {type(values[0]).__name__}, of which no column "
            "of a table can be. Write such arrays with map_chunks."
        )
    return values


def _check_mode(options: WriteOptions, *, overwrite: bool) -> None:
    if overwrite and options.append_dim is not None:
        raise InvalidInputError(
            "mode('overwrite') replaces values, and the option 'append-dim' appends. Use "
            "mode('append'), or leave the option out."
        )
    if not overwrite and options.append_dim is None:
        raise InvalidInputError(
            "mode('append') needs to know along which dimension: option('append-dim', 'time'). To "
            "write to places that the arrays have, use mode('overwrite')."
        )


def _open(session: Session, group: str) -> xarray.Dataset:
    opening = cast("Any", xarray.open_dataset)  # pyright: ignore[reportUnknownMemberType]
    try:
        with warnings.catch_warnings():
            # How times without a calendar will be read in future versions.
            warnings.simplefilter("ignore")
            dataset: xarray.Dataset = opening(
                session.store,
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
    session: Session, options: WriteOptions, dataset: xarray.Dataset, dims: tuple[str, ...]
) -> Growth:
    dim = options.append_dim
    assert dim is not None  # asked for
    if dim not in dims:
        raise InvalidInputError(
            f"The arrays cannot be appended to along {dim!r}: their dimensions are {list(dims)}."
        )
    values = coordinates_of(dataset, dim)
    indexed = dim not in dataset.variables
    given = options.append_values
    axis, most = axis_to_append(dim, values, given, indexed=indexed)
    arrays = tuple(
        (_path(options, str(name)), it.dims.index(dim))
        for name, it in dataset.variables.items()
        if dim in it.dims
    )
    coordinate = None
    if not indexed:
        stored = _stored(session, options, dim)
        coordinate = _path(options, dim), Encoding.of(dataset.variables[dim], dim, stored)
    return Growth(axis, len(values), most, arrays, coordinate)


def _is_written(
    session: Session, options: WriteOptions, variables: Sequence[tuple[str, Encoding]]
) -> bool:
    """Tell whether there is something already, and nothing is to be done then.

    Raises:
        AlreadyExistsError: that is an error.
    """
    if options.if_written == "replace":
        return False
    for path, _ in variables:
        if run(_has_chunks(session, path)):
            if options.if_written == "ignore":
                return True
            raise AlreadyExistsError(
                f"{path!r} has values already, and the option 'if-written' says that this is an "
                "error. Nothing was written.",
                path=path,
            )
    return False


async def _has_chunks(session: Session, path: str) -> bool:
    native = await session._session.session()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    async for batch in native.chunk_coordinates(f"/{path}", batch_size=1):
        if len(batch):
            return True
    return False


def _path(options: WriteOptions, name: str) -> str:
    return f"{options.group}/{name}" if options.group else name


def _stored(session: Session, options: WriteOptions, name: str) -> np.dtype[Any]:
    return np.dtype(open_array(session.store, _path(options, name)).dtype)
