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

from icechunk_async.sync.errors import translated
from icechunk_async.zarr.datasets import write_known

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, MutableMapping

    from icechunk_async.sync.session import ForkSession, Session
    from icechunk_async.zarr.datasets import Lazy, Mode, Region

__all__ = ["open_dataset", "to_icechunk", "write_lazy"]


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
        InvalidInputError: two Dask chunks share a chunk of the array. The session may have some
            of the changes.
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
