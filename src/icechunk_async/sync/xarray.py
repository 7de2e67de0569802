"""Writing xarray's datasets into sessions, and reading them.

`icechunk_async.zarr.datasets` writes what is in memory. Forks of the session write arrays that are
not computed yet. Needs `xarray`, and `dask[array]` for datasets of Dask arrays.
"""

# Dask and xarray are only partly typed.
# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import xarray
import zarr

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.datasets.queries import (
    Answers,
    Selected,
    answer_dataset,
    check_lazy,
    lazy_array,
    names_of,
    queried_name,
)
from icechunk_async.errors import WrongTypeError
from icechunk_async.session import ForkSession as AsyncForkSession
from icechunk_async.session import Session as AsyncSession
from icechunk_async.sync.errors import translated
from icechunk_async.zarr.datasets import write_known
from icechunk_async.zarr.queries.by_chunk import described

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, MutableMapping, Sequence

    from icechunk_async.sync.session import ForkSession, Session
    from icechunk_async.zarr.datasets import Lazy, Mode, Region
    from icechunk_async.zarr.queries.measuring import AggregateFunction

__all__ = ["open_aggregates", "open_dataset", "open_where", "to_icechunk", "write_lazy"]


def to_icechunk(
    obj: xarray.DataArray | xarray.Dataset,
    session: Session,
    *,
    group: str | None = None,
    mode: Mode | None = None,
    safe_chunks: bool = True,
    align_chunks: bool = False,
    append_dim: Hashable | None = None,
    region: Region | None = None,
    encoding: Mapping[Any, Any] | None = None,
    chunkmanager_store_kwargs: MutableMapping[Any, Any] | None = None,
    split_every: int | None = None,
) -> None:
    """Write a dataset into a group of a writable session; nothing is committed.

    Arrays in memory are written at once. The workers of Dask's scheduler compute and write Dask
    arrays, each in a fork of the session, and the forks are merged.

    Args:
        obj: a dataset, or an array, which is written as a dataset of one variable.
        session: a writable session.
        group: path of the group; the root if None.
        mode: `"w"` replaces the group, `"w-"` fails if it exists, `"a"` writes or replaces
            variables, `"a-"` appends to those that have `append_dim` and adds new ones,
            `"r+"` changes values of what exists. None: `"a"` with `append_dim`, `"r+"`
            with `region`, else `"w-"`.
        safe_chunks: raise an error for Dask chunks that do not fit the chunks of the array.
        align_chunks: rechunk Dask arrays so that they fit.
        append_dim: dimension to append along; the dataset must have all arrays of the group that
            have it.
        region: the part of existing arrays to write: slices by dimension, or `"auto"` to find
            them by the coordinates.
        encoding: of variables, by name.
        chunkmanager_store_kwargs: for `dask.array.store`.
        split_every: the number of change sets that are merged at a time.

    Raises:
        ValueError: as `xarray.Dataset.to_zarr`. The session may have some of the changes.
        InvalidInputError: two Dask chunks share a chunk of the array; the session may have some
            of the changes. Or ``mode`` would delete what ``append_dim`` or ``region`` adds to, or
            arrays of the group would have different lengths along a dimension, because the dataset
            lacks some that have ``append_dim`` or brings new ones; nothing was written.
        MissingDriverError: xarray needs `cftime` for the times of an array.
        ReadOnlyError: the session only reads.
    """
    with translated():
        _check_session(session)
        lazy = write_known(
            obj,
            session.store,
            group=group,
            mode=mode,
            safe_chunks=safe_chunks,
            align_chunks=align_chunks,
            append_dim=append_dim,
            region=region,
            encoding=encoding,
        )
    if lazy.sources:
        fork = session.fork()
        session.merge(write_lazy(lazy, fork, chunkmanager_store_kwargs, split_every))


def open_dataset(
    session: Session | ForkSession, group: str | None = None, **kwargs: Any
) -> xarray.Dataset:
    """Open a group of a session as a dataset that reads its values when they are needed.

    Args:
        session: any session.
        group: path of the group; the root if None.
        kwargs: for `xarray.open_dataset`, such as `chunks`, `decode_times` or
            `drop_variables`.

    Raises:
        FileNotFoundError: there is no such group.
        InvalidInputError: it is no session.
    """
    with translated():
        _check_session(session)
    return xarray.open_dataset(
        cast("Any", session.store),  # not in xarray's types
        engine="zarr",
        group=group,
        consolidated=False,
        zarr_format=3,
        **kwargs,
    )


def _check_session(given: object) -> None:
    # By what it has, not by its class: a session of the official package will do.
    if not hasattr(given, "store") or isinstance(given, AsyncSession | AsyncForkSession):
        raise WrongTypeError(
            f"Datasets are written to and read from a session of icechunk_async.sync, not a "
            f"{type(given).__module__}.{type(given).__name__}. Repository.writable_session and "
            "readonly_session begin one; icechunk_async.xarray takes those of asyncio."
        )


def write_lazy(
    lazy: Lazy,
    fork: ForkSession,
    store_kwargs: MutableMapping[Any, Any] | None,
    split_every: int | None,
) -> ForkSession:
    """Compute and write arrays through a fork; return the fork to merge."""
    from icechunk_async.sync.dask import store_dask  # noqa: PLC0415 - not without Dask

    store = fork.store
    return store_dask(
        sources=lazy.sources,
        targets=[zarr.open_array(store, path=path, mode="r+") for path in lazy.paths],
        regions=lazy.regions,
        split_every=split_every,
        **(store_kwargs or {}),
    )


def open_where(
    session: Session, conditions: str, *, group: str | None = None, **kwargs: Any
) -> xarray.DataArray:
    """Return the values that fulfil conditions, and missing values elsewhere, as a lazy array.

    The array is, of those that the conditions name, the one with the most axes. A part of it is
    read when its values are asked for: then only chunks that statistics (`Repository.analyze`) and
    coordinates leave open. Select before values are needed, `found.sel(time="2020")`: each
    access decides anew.

    Args:
        session: any session.
        conditions: as for `Session.where`, such as `"t2m > 320 and lat > 60"`.
        group: path of the group; the root if None.
        kwargs: for `xarray.open_zarr`, as of `open_dataset`, but `chunks`; times are not decoded in
            conditions.

    Returns:
        An array with the coordinates of the group; integers become floats, for values that are
        missing. One of more than 53 bits that would be rounded is an error when it is read.

    Raises:
        InvalidInputError: a condition cannot be understood, or has no order to compare.
        NodeNotFoundError: there is no such array.

    Cost: opens the group; each access as `Session.where`, and one request for each chunk of the
    array that holds a match. Memory: the part that is asked for.
    """
    check_lazy(kwargs)
    dataset = open_dataset(session, group=group, chunks=None, **kwargs)
    with translated():
        name = queried_name(dataset, conditions)
    variable = dataset.variables[name]
    return lazy_array(dataset, name, Selected(session, conditions, group or "/", variable))


def open_aggregates(
    session: Session,
    path: str,
    functions: Sequence[AggregateFunction] | AggregateFunction,
    *,
    where: str | None = None,
    per_chunk_of: Sequence[str] | str = (),
) -> xarray.Dataset:
    """Return aggregates of an array as a lazy dataset, with one variable for each.

    Nothing is computed before values are asked for, and then all variables of the part that is
    asked for, once: chunks are read only where statistics (`Repository.analyze`) do not suffice.
    The variables `chunks`, `chunks_read`, `bytes_read` and `bytes_skipped` tell what each answer
    cost; of coordinates in `where`, the first answer of a part has the bytes.

    Args:
        session: any session.
        path: the array, as for `Session.aggregate`.
        functions: what to return, such as `["min", "max", "mean"]`.
        where: conditions as for `Session.aggregate`.
        per_chunk_of: dimensions that stay. There is one value for each chunk along them, at the
            coordinate of the first cell of the chunk. By default the values are numbers without
            dimensions, of the whole array.

    Returns:
        Values as `Session.aggregate` returns them. Those of `min` and `max` have the type of the
        array; integers become doubles if they can be missing, packed ones always, and text is of
        the type `object`. Sums of integers have 64 bits, other aggregates are doubles. Without a
        value they are NaN or NaT. `min`, `max` and `mean` have the attributes of the array. Times
        that are numbers with `units` of CF stay numbers: `xarray.decode_cf` decodes them.

        No integer is rounded: where a double is needed and none is equal to it, loading raises
        InvalidInputError, and `Session.aggregate` returns it.

    Raises:
        NodeNotFoundError: there is no array.
        InvalidInputError: its values have no order, an argument cannot be understood, or there are
            more than five million chunks along `per_chunk_of`.

    Cost: to open, nothing; with `per_chunk_of`, the group and the coordinates along these
    dimensions. Each part that is asked for, as one `Session.aggregate`; parts that overlap read
    twice what they share. A pickled copy computes anew.
    """
    names, dims = names_of(functions), names_of(per_chunk_of)
    question = run(session.handle.ask(lambda it: described(it.store, path, names, where, dims)))
    around = None
    if dims:
        others = question.other_dims
        around = open_dataset(session, question.group, chunks=None, drop_variables=others)
    return answer_dataset(Answers(question, session.handle), around)
