"""Writing xarray's datasets into sessions, and reading them.

`icechunk_async.zarr.datasets` writes what is in memory. Forks of the session write arrays that are
not computed yet. Needs `xarray`, and `dask[array]` for datasets of Dask arrays.
"""

# Dask and xarray are only partly typed.
# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import anyio.to_thread
import numpy as np
import xarray
import zarr
from xarray.backends import BackendArray
from xarray.core import dtypes, indexing

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.errors import InvalidInputError, NodeNotFoundError
from icechunk_async.sync.datasets.aggregates import Answers, answer_dataset, names_of
from icechunk_async.sync.errors import translated
from icechunk_async.zarr.datasets import write_known
from icechunk_async.zarr.queries.by_chunk import described
from icechunk_async.zarr.queries.predicates import parse_where

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, MutableMapping, Sequence

    from icechunk_async.sync.session import ForkSession, Session
    from icechunk_async.zarr.datasets import Lazy, Mode, Region
    from icechunk_async.zarr.queries.measuring import AggregateFunction
    from icechunk_async.zarr.queries.selection import SelectedCells

__all__ = ["open_aggregates", "open_dataset", "open_where", "to_icechunk", "write_lazy"]

_EXACT_DOUBLES: Final = np.uint64(1 << 53)
"""All integers up to this are doubles."""


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
        append_dim: dimension to append along.
        region: the part of existing arrays to write: slices by dimension, or `"auto"` to find
            them by the coordinates.
        encoding: of variables, by name.
        chunkmanager_store_kwargs: for `dask.array.store`.
        split_every: the number of change sets that are merged at a time.

    Raises:
        ValueError: as `xarray.Dataset.to_zarr`. The session may have some of the changes.
        InvalidInputError: two Dask chunks share a chunk of the array; the session may have some
            of the changes. Or ``mode`` would delete what ``append_dim`` or ``region`` adds to;
            nothing was written.
        ReadOnlyError: the session only reads.
    """
    with translated():
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
    """
    return xarray.open_dataset(
        cast("Any", session.store),  # not in xarray's types
        engine="zarr",
        group=group,
        consolidated=False,
        zarr_format=3,
        **kwargs,
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
    question = run(session.handle.ask(lambda it: described(it, path, names, where, dims)))
    around = None
    if dims:
        others = question.other_dims
        around = open_dataset(session, question.group, chunks=None, drop_variables=others)
    return answer_dataset(Answers(question, session.handle), around)


def check_lazy(kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if arguments ask for arrays of Dask."""
    if "chunks" in kwargs:
        raise InvalidInputError(
            "The array is lazy without Dask. Leave 'chunks' out, and call '.chunk()' on the result."
        )


def queried_name(dataset: xarray.Dataset, conditions: str) -> str:
    """Return the name of the array, of those that conditions name, with the most axes.

    Raises:
        InvalidInputError: there is no condition, or one cannot be understood.
        NodeNotFoundError: there is no such array.
    """
    names = list(dict.fromkeys(it.column for it in parse_where(conditions, "The condition")))
    for name in names:
        if name not in dataset.variables:
            raise NodeNotFoundError(
                f"A condition is about {name!r}, and the group has no such array. It has "
                f"{', '.join(map(str, dataset.variables))}.",
                path=name,
            )
    if not names:
        raise InvalidInputError(
            'There is no condition. Give at least one, such as "t2m > 320 and lat > 60".'
        )
    return max(names, key=lambda it: dataset.variables[it].ndim)


def lazy_array(dataset: xarray.Dataset, name: str, selected: Selected) -> xarray.DataArray:
    """Return selected cells of an array as an array with the coordinates of its dataset."""
    variable = dataset.variables[name]
    lazy = indexing.LazilyIndexedArray(selected)
    coords = {it: at for it, at in dataset.coords.items() if set(at.dims) <= set(variable.dims)}
    coords.pop(name, None)
    return xarray.DataArray(
        xarray.Variable(variable.dims, lazy, variable.attrs), coords=coords, name=name
    )


class Part:
    """A part of an array that is filled with the cells that fulfil conditions.

    Attributes:
        region: the part as slices without steps, which conditions are asked for.
        found: its cells, missing until they are placed.
    """

    def __init__(self, key: tuple[Any, ...], variable: xarray.Variable) -> None:
        """Steps, and axes of a single place, are taken from the part around it."""
        spans: list[slice] = []
        inner: list[Any] = []
        for it, length in zip(key, variable.shape, strict=True):
            places = range(length)[it] if isinstance(it, slice) else range(it, it + 1)
            spans.append(slice(min(places), max(places) + 1) if places else slice(0, 0))
            inner.append(slice(None, None, places.step) if isinstance(it, slice) else 0)
        dtype, missing = dtypes.maybe_promote(variable.dtype)
        self.region = tuple(spans)
        self.found = np.full([it.stop - it.start for it in spans], missing, dtype)
        self._inner = tuple(inner)

    def place(self, cells: SelectedCells, values: Any) -> None:
        """Place the values of a box where its cells fulfil the conditions."""
        corner = zip(cells.box, self.region, strict=True)
        box = [slice(b.start - s.start, b.stop - s.start) for b, s in corner]
        place: tuple[Any, ...] = (*box, ...)
        part = self.found[place]  # a view, also where there are no axes
        chosen = values[cells.mask]
        if self.found.dtype.kind == "f" and chosen.dtype.kind in "iu":
            _check_doubles(chosen)
        part[cells.mask] = chosen

    def result(self) -> Any:
        """Return the cells that the key names."""
        return self.found[self._inner]


def _check_doubles(integers: Any) -> None:
    """Raise InvalidInputError if an integer has no double that is equal to it."""
    magnitudes = np.abs(integers).astype(np.uint64)
    large = magnitudes[magnitudes > _EXACT_DOUBLES]
    # Zeros at the end of a binary number belong to the exponent.
    rounded = large // (large & (~large + np.uint64(1))) > _EXACT_DOUBLES
    if rounded.any():
        value = int(integers[magnitudes > _EXACT_DOUBLES][rounded][0])
        raise InvalidInputError(
            f"The value {value} fulfils the conditions, and no double is equal to it. Integers "
            "become doubles, since other values are missing. Use 'Session.where', and read the "
            "array where its masks say."
        )


class Selected(BackendArray):
    """The cells of a variable that fulfil conditions, read part by part."""

    def __init__(
        self, session: Session, conditions: str, group: str, variable: xarray.Variable
    ) -> None:
        """Read from a session when values are asked for."""
        self.shape = variable.shape
        self.dtype, _ = dtypes.maybe_promote(variable.dtype)
        self.session = session
        self.conditions = conditions
        self.group = group
        self.variable = variable

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        """Read a part; blocks."""
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        """Read a part in a thread."""
        return await anyio.to_thread.run_sync(self.__getitem__, key)

    def _read(self, key: tuple[Any, ...]) -> Any:
        part = Part(key, self.variable)
        if part.found.size:
            for cells in self.session.where(self.conditions, group=self.group, region=part.region):
                part.place(cells, self.variable[cells.box].to_numpy())
        return part.result()
